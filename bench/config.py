"""RunConfig: the configuration of a run, in frozen dataclasses whose fields are its flags, with their help below.

At the end, the flags of the three benchmarks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from tyro.conf import Suppress, arg

from bench.draft_flags import DraftFlags, ModelDraft
from common.errors import ConfigError, flag, refuse, require_at_least
from common.flags import Given
from common.jsonl import require_appendable
from engine.drafters.config import AUTO, DrafterConfig
from models.checkpoints.config_changes import ConfigChanges
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.checkpoints.model_source import ModelSource, find_model
from models.names import Backend, Dtype, KVDtype, Scheme

DEFAULT_MODEL = str(DEFAULT_CHECKPOINT / "model.pth")
DEFAULT_PREFIX_LEN = 6000
BatchSize = Annotated[int, arg(aliases=["--batch_size"])]
NewTokens = Annotated[int, arg(aliases=["--max_new_tokens"])]


@dataclass(frozen=True)
class Target:
    """The target model, how it is stored, and what it runs on."""

    model: str = DEFAULT_MODEL
    """the target's converted checkpoint"""
    model_name: str | None = None
    """name for the record, if not its folder's; with --load_format dummy, the configuration to build"""
    load_format: Literal["pth", "dummy"] = "pth"
    """dummy: random weights, for costs only"""
    rope_scaling: str | None = None
    """yarn:FACTOR or linear:FACTOR: run with a context that is longer by this factor"""
    config_overrides: tuple[str, ...] = ()
    """KEY=VALUE ...: other values for keys of the target's config.json"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    dtype: Literal["auto"] | Dtype = "auto"
    """auto: bfloat16, but float32 on a CPU where bfloat16 is slow, or of a checkpoint published in more bits"""
    quantize: Scheme | None = None
    """the target's linear layers in 8 or 4 bits"""
    kv_dtype: Literal["same"] | KVDtype = "same"
    """entries of the target's KV cache"""
    attention: Backend = "auto"
    """attention backend; auto prints its choice, and why"""
    compile: bool = False
    """torch.compile what lies between matrix products and attention"""
    no_cuda_graphs: bool = False
    """on a GPU, do not capture rounds as CUDA graphs"""

    def require_trained(self) -> None:
        """Raise ConfigError if the weights are random."""
        if self.load_format == "dummy":
            what, fix = "random weights have nothing to say", f"leave out {flag('load_format')}"
            refuse("load_format", "dummy", "a trained model", what, fix)

    @property
    def changes(self) -> ConfigChanges:
        """The flags' changes of the model's config.json."""
        return ConfigChanges(self.rope_scaling, self.config_overrides)

    def source(self) -> ModelSource:
        """Find the model without loading it. Errors: UserError."""
        return find_model(self.model, self.load_format, self.model_name, flag("model"), self.changes)

    def with_text(self) -> ModelSource:
        """Find the model without loading it. Errors: UserError, also for random weights, which have no text."""
        self.require_trained()
        return self.source()


@dataclass(frozen=True)
class TargetBesideDraft(Target):
    """The target model, how it is stored, and what it runs on."""

    model: Annotated[str, arg(name="target", metavar="MODEL")] = DEFAULT_MODEL
    """the target's converted checkpoint"""


@dataclass(frozen=True)
class Text:
    """The text that prompts are cut from, and where prefilled prompts are kept."""

    dataset: str = "auto"
    """default (the built-in book), pg19 (from the Hugging Face hub or its local cache), a .txt, .jsonl or .parquet
    file, or a folder of these; auto: default, or pg19 if that has too little text"""
    prefix_cache: str | None = None
    """folder that keeps prefilled prompts, for later runs of the same model and storage"""
    prefix_cache_gb: float = 20.0
    """largest size of that folder; the least recently used prompts go first"""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a batch."""

    B: BatchSize = 8
    """rows decoded together"""
    prefix_len: Given[int] = None
    """prompt tokens per row; if left out, benchmarks take 6000"""
    gen_len: NewTokens = 64
    """new tokens per row"""


@dataclass(frozen=True)
class Rows:
    """The prompts, and the ends of their rows."""

    prompts: str | None = None
    """your prompts, whole and of any lengths, in place of stretches of a data set: a .txt file, a folder of them,
    a .jsonl or .parquet file with `prompt`, `turns` or `context` in each row, or a known set (spec-bench,
    speed-bench/SPLIT)"""
    num_prompts: Given[int] = None
    """prompts in all, at least B, which is the default (with --data_parallel, B of each replica)"""
    stop_at_eos: bool = False
    """end a row at the model's end token; without it, rows have a fixed length"""
    save_rows: str | None = None
    """append each row to this file as it finishes: its tokens survive a run that does not"""
    chat: bool = False
    """put --prompts into the model's chat template, each as a user's message"""


@dataclass(frozen=True)
class ChatRows(Rows):
    """The prompts, and the ends of their rows."""

    chat: Suppress[bool] = True


@dataclass(frozen=True)
class Sampling:
    """The distribution of the next token, and the rule by which drafts are verified."""

    temperature: float = 0.0
    """0 is greedy"""
    top_k: int = 0
    """keep the k likeliest tokens; 0 keeps all"""
    top_p: float = 1.0
    """keep the likeliest tokens until their mass reaches this"""
    min_p: float = 0.0
    """before these filters, drop tokens less likely than this share of the likeliest"""
    repetition_penalty: float = 1.0
    """divides positive logits of tokens of prompt and answer, and multiplies negative ones; 1 changes nothing"""
    min_tokens: int = 0
    """with --stop_at_eos: no end token among the first tokens of a row"""
    seed: Given[int] = None
    """key of the random numbers (default: 0)"""
    verification: Literal["auto", "greedy", "rejection", "coupled"] = "auto"
    """rejection: speculative sampling, the target's distribution; coupled: the samples of plain decoding in that mode,
    token for token; auto: greedy at temperature 0, else rejection"""

    @property
    def mode(self) -> str:
        """The verification mode, or `auto`, which the temperature resolves."""
        return self.verification


@dataclass(frozen=True)
class ComparedSampling(Sampling):
    """The distribution of the next token, and the rule by which drafts are verified."""

    verification: Literal["auto", "greedy", "rejection", "coupled"] = "auto"
    """coupled: the samples of plain decoding in that mode, token for token, so that all drafts decode one text;
    rejection: speculative sampling, other samples for each draft; auto: greedy at temperature 0, else coupled"""

    @property
    def mode(self) -> str:
        return "coupled" if self.verification == AUTO and self.temperature > 0 else self.verification


@dataclass(frozen=True)
class RankOptions:
    """Under torchrun: which ranks hold which model, and how they are watched."""

    data_parallel: int = 1
    """replicas of both models, each on an equal share of the ranks: prompts are divided over them, and B is of each"""
    rank_group: Given[tuple[int, ...]] = None
    """ranks that share the target, in shard order; of a replica, numbered from 0 (default: all)"""
    check_ranks: bool = False
    """compare all bytes of the weights at the start, and a digest each round; stop if any rank differs"""
    rank_timeout: float = 600
    """seconds that a rank waits for another, also to tokenise"""


@dataclass(frozen=True)
class Output:
    """The file of records."""

    output: str | None = None
    """append the JSON record to this file"""


@dataclass(frozen=True)
class Passes:
    """The passes that run next to speculation."""

    no_baseline: bool = False
    """skip plain decoding: no speedup, no comparison of rows"""
    benchmark: bool = False
    """time draft and verification steps, in a separate pass"""
    ablate: bool = False
    """decode with the draft up to three more times, in turns: with the target's weights, with all entries, and with
    both; --verification auto is then greedy or coupled, so that all decode one text"""
    by_length: int | None = None
    """report acceptance, costs and speedup for every stretch of this many generated tokens"""
    log_verification: str | None = None
    """decode again after the other passes, and append to this file a JSON line for each verified draft token: request,
    position, draft, accepted, its probabilities p by the target and q by the draft, and the target's entropy in nats"""


@dataclass(frozen=True)
class PlainRun:
    """A run of plain decoding. ranks: None if the program runs in a single process."""

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    rows: Rows = field(default_factory=Rows)
    sampling: Sampling = field(default_factory=Sampling)
    ranks: RankOptions | None = None
    output: Output = field(default_factory=Output)
    printoutput: bool = False
    """print every row's generated text"""


@dataclass(frozen=True)
class RunConfig(PlainRun):
    """A run, with draft options or, for plain decoding, None. auto_drafts: drafts that rounds may take instead."""

    draft: DrafterConfig | None = None
    auto_drafts: tuple[DrafterConfig, ...] = ()
    passes: Passes = field(default_factory=Passes)

    @property
    def drafts(self) -> tuple[DrafterConfig, ...]:
        return () if self.draft is None else (self.draft, *self.auto_drafts)

    def with_drafts(self, *drafts: DrafterConfig) -> RunConfig:
        """Return the run with other drafts, none for plain decoding."""
        return replace(self, draft=drafts[0] if drafts else None, auto_drafts=drafts[1:])

    @property
    def n_replicas(self) -> int:
        """Copies of the models, each with its share of the prompts."""
        return self.ranks.data_parallel if self.ranks else 1

    def check(self) -> None:
        """Raise ConfigError for sizes and timeouts out of range, and for files that cannot be written."""
        for name, size in (vars(self.sizes) | {"by_length": self.passes.by_length}).items():
            if size is not None:
                require_at_least(name, size, 1)
        if self.ranks:
            require_at_least("rank_timeout", self.ranks.rank_timeout, 1, 1e6)
        require_at_least("prefix_cache_gb", self.text.prefix_cache_gb, 1e-3, 1e9)
        if (folder := self.text.prefix_cache) and os.path.exists(folder) and not os.path.isdir(folder):
            what, fix = "prefilled prompts are kept in a folder", "name a folder, or a new one"
            refuse("prefix_cache", folder, "a folder", what, fix)
        if self.passes.ablate and self.passes.no_baseline:
            what, required = "drafts are compared by their speedups", f"no {flag('no_baseline')}"
            refuse("ablate", f"with {flag('no_baseline')}", required, what, f"leave out {flag('no_baseline')}")
        files = {"output": self.output.output, "save_rows": self.rows.save_rows}
        files |= {"log_verification": self.passes.log_verification}
        written = dict[str, str]()  # the flag of each file
        for name, file in files.items():
            require_appendable(file, name)
            if file and (other := written.setdefault(os.path.realpath(file), name)) != name:
                where, what = f"{flag(name)} and {flag(other)}", "lines of two kinds would be mixed"
                raise ConfigError(what, where, file, "two files", f"name another file for {flag(name)}")


@dataclass(frozen=True)
class BenchmarkSizes(Sizes):
    """The sizes of a batch."""

    max_len: int | None = None
    """tokens of a row, prompt and new ones together, in the place of --gen_len (its name in MagicDec's scripts)"""

    def sizes(self) -> Sizes:
        """Return the sizes with the number of new tokens. Errors: ConfigError for no room after a prompt."""
        n_new = self.gen_len
        if self.max_len is not None:
            n_new = self.max_len - (self.prefix_len or self.max_len)
            if n_new < 1 or self.gen_len not in (Sizes.gen_len, n_new):
                what, fix = "no row has such a length", f"use {flag('gen_len')} instead"
                required = f"more than {flag('prefix_len')}, which has to be given, and no {flag('gen_len')}"
                refuse("max_len", self.max_len, required, what, fix)
        return Sizes(self.B, self.prefix_len, n_new)


@dataclass(frozen=True, kw_only=True)
class BaselineFlags(PlainRun):
    sizes: BenchmarkSizes = field(default_factory=BenchmarkSizes)
    ranks: RankOptions = field(default_factory=RankOptions)

    def config(self) -> RunConfig:
        """Return the run that the flags describe, without a draft. Errors: ConfigError."""
        return RunConfig(**vars(self) | {"sizes": self.sizes.sizes(), "draft": None})


@dataclass(frozen=True, kw_only=True)
class SelfSpecFlags(BaselineFlags):
    draft: DraftFlags = field(default_factory=DraftFlags)
    passes: Passes = field(default_factory=Passes)

    def config(self) -> RunConfig:
        (drafts,) = self.draft.choices({})
        return super().config().with_drafts(*drafts)


@dataclass(frozen=True, kw_only=True)
class LongSpecFlags(SelfSpecFlags):
    FLAGS: ClassVar[dict[str, str]] = {"model": "--target", "draft_model": "--model"}

    target: TargetBesideDraft = field(default_factory=TargetBesideDraft)
    draft: ModelDraft = field(default_factory=ModelDraft)
