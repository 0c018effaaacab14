"""Session: a plan with its loaded models, the target's cache, prompts, and the ranks that run it."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from bench.agreement import common_facts, prefix_store
from bench.config import AUTO, RankOptions, RunConfig, Sampling
from bench.data import load_books, make_prompts
from bench.memory import require_room, require_room_to_run
from bench.plan import Plan, PromptText, resolve
from common.errors import UserError, refuse
from common.say import dtype_name, say
from engine.drafters import Drafter
from engine.drafters.config import BuildInputs, DrafterConfig
from engine.drafters.stored import Models
from engine.generation import GenerateOutput, Generation
from engine.graphs import CudaGraphs
from engine.parallel.ranks import Ranks, start_ranks
from engine.runner import ModelRunner
from kv_cache import FullKVCache
from models.checkpoints.tokenizer import Tokenizer
from models.experts import is_grouped
from models.kernels.row_bits import fewest_rows
from models.storage import auto_dtype
from models.tensor_parallel import Shard

Value = TypeVar("Value")


@dataclass(frozen=True)
class Session:
    """A loaded target over its cache, and the prompts of one replica.

    processes: ranks of all replicas. run: a name for the record and saved rows. numbered_from: the first prompt's index
    among the prompts of all replicas. models: models and heads that draft. continuations: tokens after each prompt,
    where they were cut. put_off: errors to raise when the run has ended.
    """

    plan: Plan
    runner: ModelRunner
    prompts: list[list[int]]
    tokenizer: Tokenizer | None
    models: Models
    processes: Ranks
    run: str
    numbered_from: int = 0
    continuations: list[list[int]] = field(default_factory=list)
    put_off: list[UserError] = field(default_factory=list)

    @classmethod
    def open(cls, config: RunConfig, prompts: Sequence[PromptText] | None = None) -> Session:
        """Check a run, the cheapest checks first; then load its models and allocate the target's cache.

        prompts: texts to continue, whole, or their token ids, in place of the configuration's. Errors: UserError.
        """
        return cls.of_plan(resolve(config, prompts))

    @classmethod
    def of_plan(cls, plan: Plan, n_continued: int = 0, *, options: object = None) -> Session:
        """Open a session. n_continued: tokens to cut after each prompt of a data set. options: a dataclass of further
        options that ranks need to have in common. Errors: UserError."""
        gc.unfreeze()  # objects of an earlier session may be collected
        require_room(plan)
        watched, n_replicas = plan.config.ranks or RankOptions(), plan.config.n_replicas
        timeout, facts = watched.rank_timeout, partial(common_facts, plan, options)
        processes = start_ranks(plan.target.device, facts, check=watched.check_ranks, timeout_seconds=timeout)
        ranks = processes.replica(n_replicas)
        if ranks.device.type == "cuda":  # graphs and kernels are made on the current device
            torch.cuda.set_device(ranks.device)
        run = processes.broadcast_object(lambda: uuid.uuid4().hex[:12])
        for remark in ranks.broadcast_object(plan.remarks):
            say(f"note: {remark}")
        tokenizer = plan.target.source.tokenizer() if plan.target.source.has_text and ranks.leads else None
        first, last = Shard(ranks.first // ranks.size, n_replicas).span(plan.n_prompts)
        stretches = ranks.broadcast_object(lambda: _prompts(plan, tokenizer, n_continued)[first:last])
        prompts = [stretch[: plan.target.prefix_len] for stretch in stretches]
        continuations = [stretch[plan.target.prefix_len :] for stretch in stretches]
        models, runner = _load(plan, ranks)
        require_room_to_run(plan, runner)
        return cls(plan, runner, prompts, tokenizer, models, processes, run, first, continuations)

    @property
    def ranks(self) -> Ranks:
        """The ranks of this replica."""
        return self.runner.ranks

    @property
    def name(self) -> str:
        return self.plan.target.source.name

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of `generate` for this run, without stop tokens."""
        return {
            "sampling": self.plan.sampling,
            "verification": self.plan.verification,
            "max_new_tokens": self.plan.target.gen_len,
            "numbered_from": self.numbered_from,
        }

    def by_replica(self, value: Value) -> list[Value]:
        """Return the values of the replicas' leaders, on every process; every process has to call this."""
        return self.processes.all_gather_object(value)[:: self.ranks.size]

    def variant(
        self,
        *,
        drafts: Sequence[DrafterConfig] | None = None,
        sampling: Sampling | None = None,
        prompts: list[list[int]] | None = None,
        gen_len: int | None = None,
    ) -> Session:
        """Return a session of the same model and cache with other drafts to choose among (none: plain decoding),
        sampling or prompts.

        Weights of a draft are loaded unless a draft of this session has them. Errors: UserError for a draft that the
        target cannot have.
        """
        plan = self.plan
        if gen_len is not None:
            config = replace(plan.config, sizes=replace(plan.config.sizes, gen_len=gen_len))
            plan = replace(plan, config=config, target=replace(plan.target, gen_len=gen_len))
        if sampling is not None:
            plan = plan.with_sampling(sampling)
        if drafts is not None:
            plan = plan.with_drafts(*drafts)
        for planned in plan.candidates:
            planned.load(self.models)
        return replace(self, plan=plan, prompts=self.prompts if prompts is None else prompts)

    def drafters(self, texts: Sequence[Sequence[int]] | None = None) -> list[Drafter]:
        """Return a drafter over an empty cache for each candidate of the plan. texts: the tokens of plain decoding."""
        plan = self.plan
        inputs = BuildInputs(self.runner, self.models, plan.target.capacity, texts, plan.chooses, self.tokenizer)
        return [draft.build(inputs) for draft in plan.candidates]

    def drafter(self, draft: DrafterConfig | None = None) -> Drafter:
        """Return the drafter of a configuration (default: the session's) over an empty cache. Errors: ConfigError, also
        for `auto`."""
        session = self if draft is None else self.variant(drafts=[draft])
        if session.plan.automatic or not session.plan.candidates:
            required, fix = "a draft of one gamma and one budget", "name numbers, or use make_controller()"
            refuse("Session.drafter", session.plan.automatic, required, "there is no single drafter", fix)
        (drafter,) = session.drafters()
        return drafter

    def generate(self, drafter: Drafter | None = None, **arguments: Any) -> GenerateOutput:
        """Continue the prompts. arguments: arguments of `generate`, in place of the configuration's."""
        generation = self.generation(drafter=drafter, **arguments)
        generation.run()
        return generation.output

    def generation(self, **arguments: Any) -> Generation:
        """Return a decode of the prompts that has not begun. arguments: see `generate`."""
        stop_tokens = self.plan.target.source.end_tokens if self.plan.config.rows.stop_at_eos else ()
        return Generation(self.runner, self.prompts, **self.how | {"stop_tokens": stop_tokens} | arguments)


def _load(plan: Plan, ranks: Ranks) -> tuple[Models, ModelRunner]:
    """Load the target and all models that draft; return them, and the target with an empty cache."""
    models, target = Models(plan.target, ranks), plan.target
    why = f" ({auto_dtype(target.device, target.source)[1]})" if plan.config.target.dtype == AUTO else ""
    say(f"loading {target.source.name} on {target.device} as {dtype_name(target.weights.dtype)}{why}")
    model = models.load_target()
    for draft in plan.candidates:  # before the cache: converting a checkpoint needs room that the cache takes later
        draft.load(models)
    captures = target.device != "cpu" and not plan.config.target.no_cuda_graphs
    captures = captures and (not model.config.n_expert or is_grouped(ranks.device, model.dtype))
    new_graphs = CudaGraphs if captures else None
    cache = FullKVCache(model.config, target.n_rows, target.capacity, target.device, target.kv_dtype)
    folder = plan.config.text.prefix_cache
    prefixes = prefix_store(folder, plan, model, models.target_ranks) if folder else None
    runner = ModelRunner(model, cache, None, ranks, new_graphs, prefixes, fewest_rows(model))
    return models, runner


def _prompts(plan: Plan, tokenizer: Tokenizer | None, n_continued: int) -> list[list[int]]:
    """Return the prompts, with `n_continued` tokens after those that are cut; for random weights, random tokens."""
    target = plan.target
    if plan.prompts is not None:
        return plan.prompts
    if tokenizer is None or plan.dataset is None:
        return random_prompts(target.source.config.vocab_size, plan.n_prompts, target.prefix_len)
    say(f"tokenising {plan.n_prompts} prompts of {target.prefix_len} tokens from {plan.dataset}")
    length = target.prefix_len + n_continued
    prompts = make_prompts(load_books(plan.dataset), tokenizer, n_prompts=plan.n_prompts, prefix_len=length)
    target.source.check_tokens(prompts)
    return prompts


def random_prompts(vocab_size: int, n_prompts: int, prefix_len: int) -> list[list[int]]:
    """Return prompts of random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (n_prompts, prefix_len), generator=generator).tolist()
