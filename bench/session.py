"""A session: ranks joined, models loaded, the target's cache, prompts; what a run's configuration becomes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any, TypeVar

import torch

from bench.config import AUTO, RankOptions, RunConfig, Sampling
from bench.data import load_books, make_prompts
from bench.loading import Models, load_draft, load_target
from bench.memory import require_room
from bench.plan import Plan, remarks, resolve, with_draft
from bench.resolved import ResolvedDraft, auto_dtype, resolve_sampling
from bench.text import PromptText
from common.errors import ConfigError, UserError
from common.say import dtype_name, say
from engine.decoding import GenerateOutput, Generation
from engine.drafters import Drafter
from engine.drafters.combined import beside_texts
from engine.drafters.config import DrafterConfig, Parts
from engine.drafters.self_speculation import SelfSpeculation
from engine.drafters.speculated import Speculated
from engine.graphs import CudaGraphs
from engine.parallel.ranks import ModelRanks, Ranks, model_ranks, start_ranks
from engine.requests import check_prompt
from engine.runner import ModelRunner, RemoteRunner
from kv_cache import FullKVCache, KVCache
from models import ModelConfig
from models.checkpoints.tokenizer import Tokenizer
from models.tensor_parallel import Shard

Value = TypeVar("Value")


@dataclass(frozen=True)
class Session(Plan):
    """A plan carried out: a loaded model over its cache, and the prompts to continue, of one replica. continuations: of
    the data set behind each prompt, if asked for. run: what names the run in its record and saved rows. put_off: errors
    that a run outlives, and ends with. processes: the ranks of all replicas. numbered_from: the first prompt's index
    among those of all."""

    runner: ModelRunner
    prompts: list[list[int]]
    tokenizer: Tokenizer | None
    target_ranks: ModelRanks
    processes: Ranks
    run: str
    numbered_from: int = 0
    draft_ranks: ModelRanks | None = None
    models: Models = field(default_factory=dict)
    continuations: list[list[int]] = field(default_factory=list)
    put_off: list[UserError] = field(default_factory=list)

    @classmethod
    def open(cls, config: RunConfig, prompts: Sequence[PromptText] | None = None) -> Session:
        """Check everything that can be wrong, cheapest first; then load the models and allocate the target's cache.
        prompts: texts to continue, whole, or their ids, in place of the configuration's. Errors: UserError."""
        return cls.of_plan(resolve(config, prompts))

    @classmethod
    def of_plan(cls, plan: Plan, n_continued: int = 0) -> Session:
        """The same, of a plan. n_continued: tokens of the data set to cut behind each prompt. Errors: UserError."""
        require_room(plan)
        processes, n_replicas = _join_ranks(plan), plan.config.n_replicas
        ranks = processes.replica(n_replicas)
        if ranks.device.type == "cuda":  # graphs and kernels are made on the current device
            torch.cuda.set_device(ranks.device)
        target_ranks = model_ranks(ranks, plan.group)
        draft_ranks = model_ranks(ranks, plan.draft_group) if plan.draft_source else None
        # Found now, and read when the prompts are cut.
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
        new_graphs = None if plan.device == "cpu" or plan.config.target.no_cuda_graphs else CudaGraphs
        cache = FullKVCache(model.config, plan.n_rows, plan.capacity, device=plan.device, dtype=plan.kv_dtype)
        runner = ModelRunner(model, cache, ranks=ranks, new_graphs=new_graphs)
        for index, prompt in enumerate(prompts, first):
            check_prompt(runner, index, prompt, plan.gen_len, plan.gamma)
        own: dict[str, Any] = {"runner": runner, "prompts": prompts, "tokenizer": tokenizer, "numbered_from": first}
        own |= {"target_ranks": target_ranks, "draft_ranks": draft_ranks, "processes": processes, "models": models}
        run = processes.shared(lambda: uuid.uuid4().hex[:12])
        return cls(**vars(plan), **own, run=run, continuations=continuations)

    @property
    def plan(self) -> Plan:
        return self

    @property
    def ranks(self) -> Ranks:
        return self.runner.ranks

    def of_replicas(self, value: Value) -> list[Value]:
        """What the leader of each replica has, on every process; all have to call this."""
        return self.processes.gathered(value)[:: self.ranks.size]

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def draft_model(self) -> Any:
        """The model or head that drafts, where that is not the target itself; None on a rank that has no part of it."""
        return self.models.get(self.draft.form) if self.draft else None

    @property
    def how(self) -> dict[str, Any]:
        """How it decodes, as arguments of `generate`; whatever would end a row is not among them."""
        sampling: dict[str, Any] = {"sampling": self.sampling.params, "verification": self.sampling.mode}
        return sampling | {"max_new_tokens": self.gen_len, "numbered_from": self.numbered_from}

    def books(self) -> Iterator[str]:
        """Those of the data set, from the first on. For a target that has text."""
        assert self.dataset is not None, "random weights and one's own prompts read no data set"
        return load_books(self.dataset)

    def variant(
        self,
        *,
        draft: DrafterConfig | EllipsisType | None = ...,
        sampling: Sampling | None = None,
        prompts: list[list[int]] | None = None,
        gen_len: int | None = None,
    ) -> Session:
        """The same model and cache under another draft (None: plain decoding) or sampling; what is not given stays.
        What drafts is loaded where no draft of this session had its form. Errors: ConfigError for a draft that the
        models cannot do, and for another draft model than the session's."""
        own = self.config
        sizes = own.sizes if gen_len is None else replace(own.sizes, gen_len=gen_len)
        sampling = own.sampling if sampling is None else sampling
        config = replace(own, sizes=sizes, sampling=sampling)
        prompts = self.prompts if prompts is None else prompts
        session = replace(self, config=config, sampling=resolve_sampling(sampling), prompts=prompts)
        if not isinstance(draft, EllipsisType):
            session = with_draft(session, draft)
        load_draft(session, self.models, self.runner.model, self.target_ranks, self.draft_ranks)
        return session

    def narrowed(self, n_rows: int, length: int) -> Session:
        """The same model over the first rows and slots of the cache, as if it had no others; its entries are gone."""
        own = self.runner
        own.cache.prefilled.clear()
        cache = own.cache.view(slice(0, n_rows), length)
        cache.capacity, cache.prefilled = cache.positions.shape[1], {}
        runner = ModelRunner(own.model, cache, ranks=own.ranks, new_graphs=own.new_graphs)
        return replace(self, runner=runner, n_rows=n_rows, capacity=length)

    def drafters(self, texts: Sequence[Sequence[int]] | None = None) -> list[Drafter]:
        """One drafter, or one for each policy and budget that `auto` chooses among, the largest budgets first."""
        assert self.draft is not None, "the session was opened without a draft"
        return [self._build(one, texts) for one in self.draft.each()]

    def drafter(self, draft: DrafterConfig | None = None, *, texts: Sequence[Sequence[int]] | None = None) -> Drafter:
        """That drafter, or the configuration's, over an empty cache; weights of one form are loaded once. texts: what
        the baseline emitted, for a drafter that needs it. Errors: ConfigError, also for `auto`."""
        own = self if draft is None else self.variant(draft=draft)
        if own.draft is None or own.draft.automatic or (own.draft.config.needs_baseline and texts is None):
            required = "a draft of one gamma and one budget, and texts for an oracle"
            fix = "name numbers, or use drafters() with passes.make_pacing()"
            raise ConfigError("there is no one drafter to make", "Session.drafter", own.config.draft, required, fix)
        return own._build(own.draft, texts)

    def _build(self, draft: ResolvedDraft, texts: Sequence[Sequence[int]] | None) -> Drafter:
        def new_cache(config: ModelConfig) -> KVCache:
            assert draft.policy is not None and draft.kv_dtype is not None
            rows, device = self.runner.max_batch, self.runner.device
            return draft.policy.new_cache(config, rows, self.capacity, device, draft.kv_dtype)

        def remote() -> RemoteRunner:
            assert draft.source is not None and draft.dtype is not None and self.draft_ranks is not None
            return RemoteRunner(draft.source.config, draft.dtype, self.runner.max_batch, self.ranks, self.draft_ranks)

        model = self.models.get(draft.form)
        parts = Parts(self.runner, draft.gamma, model, new_cache, remote, texts, self.chooses)
        drafter = draft.config.build(parts)
        if draft.inner:
            assert isinstance(drafter, SelfSpeculation)
            drafter = Speculated(drafter, self._build(draft.inner, texts))
        drafter.schedule = draft.config.schedule(parts)
        return beside_texts(drafter, draft.config, parts)

    def generate(self, drafter: Drafter | None = None, **arguments: Any) -> GenerateOutput:
        """Continue the prompts by the configuration's sampling and length, or by `arguments`, as of `generate`."""
        generation = self.generation(drafter=drafter, **arguments)
        generation.run()
        return generation.output

    def generation(self, **arguments: Any) -> Generation:
        """Begin what `generate` does."""
        stop_tokens = self.target.config.eos_tokens if self.config.rows.stop_at_eos else ()
        return Generation(self.runner, self.prompts, **self.how | {"stop_tokens": stop_tokens} | arguments)


def _join_ranks(plan: Plan) -> Ranks:
    options = plan.config.ranks or RankOptions()
    return start_ranks(plan.device, check=options.check_ranks, timeout_seconds=options.rank_timeout)


def _prompts(plan: Plan, tokenizer: Tokenizer | None, books: Iterator[str], n_continued: int) -> list[list[int]]:
    """One's own, or stretches of the data set, so much longer; random tokens for random weights without a tokenizer."""
    if plan.own_prompts is not None:
        return plan.own_prompts
    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        shape = (plan.n_prompts, plan.prefix_len)
        return torch.randint(plan.target.config.vocab_size, shape, generator=generator).tolist()
    say(f"tokenising {plan.n_prompts} prompts of {plan.prefix_len} tokens from {plan.dataset}")
    prompts = make_prompts(books, tokenizer, n_prompts=plan.n_prompts, prefix_len=plan.prefix_len + n_continued)
    plan.target.check_tokens(prompts)
    return prompts
