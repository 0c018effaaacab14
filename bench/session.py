"""Session: a plan with its loaded models, the target's cache, prompts, and the ranks that run it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import EllipsisType
from typing import Any, TypeVar

import torch

from bench.agreement import common_facts
from bench.config import AUTO, RankOptions, RunConfig, Sampling
from bench.data import load_books, make_prompts
from bench.draft_plan import with_draft
from bench.memory import require_room, require_room_to_run
from bench.plan import remarks, resolve, resolve_sampling
from bench.plan_types import DraftPlan, Plan, PromptText
from bench.prefixes import prefix_store
from common.errors import ConfigError, UserError
from common.say import dtype_name, say
from engine.drafters import Drafter
from engine.drafters.combined import beside_texts
from engine.drafters.config import DrafterConfig, Parts
from engine.drafters.self_speculation import SelfSpeculation
from engine.drafters.speculated import Speculated
from engine.generation import GenerateOutput, Generation
from engine.graphs import CudaGraphs
from engine.parallel.ranks import ModelRanks, Ranks, model_ranks, start_ranks
from engine.requests import check_prompt
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import FullKVCache, KVCache
from models import ModelConfig, Transformer
from models.checkpoints.model_source import ModelSource
from models.checkpoints.tokenizer import Tokenizer
from models.experts import is_grouped
from models.heads.loading import HeadSource
from models.kernels.pointwise import compiled, use_pointwise
from models.kernels.pointwise_cpp import pointwise_for
from models.llama import select_layers
from models.storage import auto_dtype
from models.tensor_parallel import Shard

Value = TypeVar("Value")
# Models and heads that draft, by `DraftPlan.weights`.
Models = dict[tuple[object, ...], Any]


@dataclass(frozen=True)
class Session:
    """A loaded target over its cache, and the prompts of one replica.

    processes: ranks of all replicas. run: a name for the record and saved rows. numbered_from: the first prompt's index
    among the prompts of all replicas. models: models and heads that draft. continuations: tokens behind each prompt,
    where they were cut. put_off: errors to raise when the run has ended.
    """

    plan: Plan
    runner: ModelRunner
    prompts: list[list[int]]
    tokenizer: Tokenizer | None
    target_ranks: ModelRanks
    draft_ranks: ModelRanks | None
    processes: Ranks
    run: str
    numbered_from: int = 0
    models: Models = field(default_factory=dict)
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
        """Open a session. n_continued: tokens to cut behind each prompt of a data set. options: a dataclass of further
        options that ranks need to have in common. Errors: UserError."""
        require_room(plan)
        watched, n_replicas = plan.config.ranks or RankOptions(), plan.config.n_replicas
        timeout, facts = watched.rank_timeout, partial(common_facts, plan, options)
        processes = start_ranks(plan.device, facts, check=watched.check_ranks, timeout_seconds=timeout)
        ranks = processes.replica(n_replicas)
        if ranks.device.type == "cuda":  # graphs and kernels are made on the current device
            torch.cuda.set_device(ranks.device)
        target_ranks = model_ranks(ranks, plan.group)
        draft_ranks = model_ranks(ranks, plan.draft_group) if plan.draft_source else None
        # Books that are not there are reported now; their text is read when prompts are cut.
        books = load_books(plan.dataset) if plan.dataset is not None and ranks.leads else iter(())
        for remark in ranks.shared(lambda: remarks(plan)):
            say(f"note: {remark}")
        why = f" ({auto_dtype(plan.device, plan.target)[1]})" if plan.config.target.dtype == AUTO else ""
        say(f"loading {plan.target.name} on {plan.device} as {dtype_name(plan.dtype)}{why}")
        tokenizer = plan.target.tokenizer() if plan.target.has_text and ranks.leads else None
        first, last = Shard(ranks.first // ranks.size, n_replicas).span(plan.n_prompts)
        stretches = ranks.shared(lambda: _prompts(plan, tokenizer, books, n_continued)[first:last])
        prompts = [stretch[: plan.prefix_len] for stretch in stretches]
        continuations = [stretch[plan.prefix_len :] for stretch in stretches]
        models: Models = {}
        model = load_target(plan, target_ranks)
        # Before the cache: a checkpoint that is being converted needs room that the cache takes later.
        load_draft(plan, models, model, target_ranks, draft_ranks)
        captures = plan.device != "cpu" and not plan.config.target.no_cuda_graphs
        captures = captures and (not model.config.n_expert or is_grouped(ranks.device, model.dtype))
        new_graphs = CudaGraphs if captures else None
        cache = FullKVCache(model.config, plan.n_rows, plan.capacity, device=plan.device, dtype=plan.kv_dtype)
        prefixes = prefix_store(plan, model, target_ranks)
        runner = ModelRunner(model, cache, ranks=ranks, new_graphs=new_graphs, prefixes=prefixes)
        require_room_to_run(plan, runner)
        for index, prompt in enumerate(prompts, first):
            check_prompt(runner, index, prompt, plan.gen_len, plan.gamma)
        run = processes.shared(lambda: uuid.uuid4().hex[:12])
        groups = target_ranks, draft_ranks, processes
        return cls(plan, runner, prompts, tokenizer, *groups, run, first, models, continuations)

    @property
    def ranks(self) -> Ranks:
        """The ranks of this replica."""
        return self.runner.ranks

    @property
    def name(self) -> str:
        return self.plan.target.name

    @property
    def how(self) -> dict[str, Any]:
        """Arguments of `generate` for this run, without stop tokens."""
        return {
            "sampling": self.plan.sampling,
            "verification": self.plan.verification,
            "max_new_tokens": self.plan.gen_len,
            "numbered_from": self.numbered_from,
        }

    def by_replica(self, value: Value) -> list[Value]:
        """Return the values of the replicas' leaders, on every process; every process has to call this."""
        return self.processes.gathered(value)[:: self.ranks.size]

    def books(self) -> Iterator[str]:
        """Return the texts of the data set."""
        assert self.plan.dataset is not None, "random weights and a user's prompts read no data set"
        return load_books(self.plan.dataset)

    def variant(
        self,
        *,
        draft: DrafterConfig | EllipsisType | None = ...,
        sampling: Sampling | None = None,
        prompts: list[list[int]] | None = None,
        gen_len: int | None = None,
    ) -> Session:
        """Return a session of the same model and cache with another draft (None: plain decoding), sampling or prompts.

        Weights of a draft are loaded unless a draft of this session has them. Errors: ConfigError for a draft that the
        models cannot do, and for another draft model than the session's.
        """
        plan = self.plan
        if gen_len is not None:
            plan = replace(plan, config=replace(plan.config, sizes=replace(plan.config.sizes, gen_len=gen_len)))
        if sampling is not None:
            params, verification = resolve_sampling(sampling)
            config = replace(plan.config, sampling=sampling)
            plan = replace(plan, config=config, sampling=params, verification=verification)
        if not isinstance(draft, EllipsisType):
            plan = with_draft(plan, draft)
        load_draft(plan, self.models, self.runner.model, self.target_ranks, self.draft_ranks)
        return replace(self, plan=plan, prompts=self.prompts if prompts is None else prompts)

    def narrowed(self, n_rows: int, length: int) -> Session:
        """Return a session over the first rows and slots of the cache, and forget its entries."""
        runner = self.runner
        runner.cache.prefilled.clear()
        cache = runner.cache.view(slice(0, n_rows), length)
        cache.capacity, cache.prefilled = cache.positions.shape[1], {}
        runner = ModelRunner(runner.model, cache, ranks=runner.ranks, new_graphs=runner.new_graphs)
        return replace(self, runner=runner, plan=replace(self.plan, n_rows=n_rows, capacity=length))

    def drafters(self, texts: Sequence[Sequence[int]] | None = None) -> list[Drafter]:
        """Return a drafter for each draft, policy and budget to choose among, largest budget first."""
        assert self.plan.draft is not None, "the session was opened without a draft"
        return [self._build(draft, texts) for draft in self.plan.draft.each()]

    def drafter(self, draft: DrafterConfig | None = None, *, texts: Sequence[Sequence[int]] | None = None) -> Drafter:
        """Return the drafter of a configuration (default: the session's) over an empty cache.

        texts: the tokens of plain decoding, for a drafter that needs them. Errors: ConfigError, also for `auto`.
        """
        session = self if draft is None else self.variant(draft=draft)
        planned = session.plan.draft
        if planned is None or planned.automatic or (planned.config.needs_baseline and texts is None):
            required = "a draft of one gamma and one budget, and texts for an oracle"
            fix = "name numbers, or use drafters() with passes.make_pacing()"
            raise ConfigError("there is no single drafter", "Session.drafter", planned, required, fix)
        return session._build(planned, texts)

    def _build(self, draft: DraftPlan, texts: Sequence[Sequence[int]] | None) -> Drafter:
        def new_cache(config: ModelConfig) -> KVCache:
            assert draft.policy is not None and draft.kv_dtype is not None
            rows, device = self.runner.max_batch, self.runner.device
            return draft.policy.new_cache(config, rows, self.plan.capacity, device, draft.kv_dtype)

        def remote() -> RemoteRunner:
            assert draft.source is not None and draft.dtype is not None and self.draft_ranks is not None
            return RemoteRunner(draft.source.config, draft.dtype, self.runner.max_batch, self.ranks, self.draft_ranks)

        model = self.models.get(draft.weights)
        parts = Parts(self.runner, draft.gamma, model, new_cache, remote, texts, self.plan.chooses, self.tokenizer)
        drafter = draft.config.build(parts)
        if draft.inner:
            assert isinstance(drafter, SelfSpeculation)
            drafter = Speculated(drafter, self._build(draft.inner, texts))
        drafter.schedule = draft.config.schedule(parts)
        return beside_texts(drafter, draft.config, parts)

    def generate(self, drafter: Drafter | None = None, **arguments: Any) -> GenerateOutput:
        """Continue the prompts. arguments: arguments of `generate`, in place of the configuration's."""
        generation = self.generation(drafter=drafter, **arguments)
        generation.run()
        return generation.output

    def generation(self, **arguments: Any) -> Generation:
        """Return a decode of the prompts that has not begun. arguments: see `generate`."""
        stop_tokens = self.plan.target.end_tokens if self.plan.config.rows.stop_at_eos else ()
        return Generation(self.runner, self.prompts, **self.how | {"stop_tokens": stop_tokens} | arguments)


def _prompts(plan: Plan, tokenizer: Tokenizer | None, books: Iterator[str], n_continued: int) -> list[list[int]]:
    """Return the prompts, with `n_continued` tokens behind those that are cut; for random weights, random tokens."""
    if plan.prompts is not None:
        return plan.prompts
    if tokenizer is None:
        return random_prompts(plan.target.config.vocab_size, plan.n_prompts, plan.prefix_len)
    say(f"tokenising {plan.n_prompts} prompts of {plan.prefix_len} tokens from {plan.dataset}")
    prompts = make_prompts(books, tokenizer, n_prompts=plan.n_prompts, prefix_len=plan.prefix_len + n_continued)
    plan.target.check_tokens(prompts)
    return prompts


def random_prompts(vocab_size: int, n_prompts: int, prefix_len: int) -> list[list[int]]:
    """Return prompts of random tokens, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (n_prompts, prefix_len), generator=generator).tolist()


def load_target(plan: Plan, ranks: ModelRanks) -> Transformer:
    """Load the target, or this rank's shard of it."""
    model = _load(plan, plan.target, ranks, dtype=plan.dtype, quantize=plan.config.target.quantize)
    _prepare(plan, model, plan.kv_dtype, "attention")
    return model


def load_draft(
    plan: Plan, models: Models, target: Transformer, target_ranks: ModelRanks, draft_ranks: ModelRanks | None
) -> None:
    """Load the models that draft into `models`, unless they are there or are the target as it is loaded."""
    for draft in plan.draft.levels if plan.draft else ():
        if draft.weights in models or (draft.dtype is None and draft.source is None):
            continue
        model = _draft_model(plan, draft, target, target_ranks, draft_ranks)
        if model is None:
            continue
        models[draft.weights] = model
        if draft.quantize and vars(draft.config).get("draft_weights") == AUTO:
            say(f"the draft's weights: {draft.quantize} (--draft_weights auto)")
        if draft.policy is not None:
            _prepare(plan, getattr(model, "body", model), draft.kv_dtype, "the draft's attention")


def _draft_model(
    plan: Plan, draft: DraftPlan, target: Transformer, target_ranks: ModelRanks, draft_ranks: ModelRanks | None
) -> Any:
    """Return a model or head that drafts; None if that is the target itself, or if this rank holds no part of it."""
    stored: dict[str, Any] = {"dtype": draft.dtype or plan.dtype, "quantize": draft.quantize}
    if isinstance(draft.source, HeadSource):
        if borrowed := draft.source.borrowed:
            say(f"{draft.source.name} uses the target's {' and '.join(borrowed)}")
        return draft.source.load(device=plan.device, **stored)
    if draft.source is not None:
        return _load(plan, draft.source, draft_ranks, **stored) if draft_ranks and draft_ranks.holds else None
    if not plan.shares_weights(draft):
        return _load(plan, plan.target, target_ranks, **stored, layers=draft.layers)
    return select_layers(target, draft.layers) if draft.layers is not None else None


def _load(plan: Plan, source: ModelSource, ranks: ModelRanks, **stored: Any) -> Transformer:
    exchange = ranks if len(plan.group) > 1 else None
    return source.load(device=plan.device, attention=plan.config.target.attention, exchange=exchange, **stored)


def _prepare(plan: Plan, model: Transformer, entries: torch.dtype | None, name: str) -> None:
    """Give a model the attention backend for its shape and KV entries, and pointwise kernels that suit the backend."""
    config = model.config
    model.backend, why = plan.attention(config, model.dtype, entries)
    say(f"{name}: {model.backend.name} ({why})")
    sizes = (config.dim, config.ffn_dim, config.n_head, config.n_kv_head, config.head_dim)
    compiles = plan.config.target.compile
    use_pointwise(model, compiled(sizes=sizes) if compiles else pointwise_for(model.backend.name))
