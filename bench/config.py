"""What a run is: frozen dataclasses whose fields are its flags. Imports no torch, so that --help is quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from common.errors import ConfigError, flag
from common.flags import COMMON, Common
from engine.drafters.config import DrafterConfig
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.checkpoints.model_source import ModelSource, find_model
from models.names import Backend, Dtype, KVDtype, Scheme

AUTO = "auto"
DEFAULT_MODEL = str(DEFAULT_CHECKPOINT / "model.pth")
DEFAULT_ROWS, DEFAULT_PREFIX_LEN = 8, 6000
BatchSize = Annotated[int, arg(aliases=["--batch_size"]), COMMON]


@dataclass(frozen=True)
class Target:
    """The target model, how it is stored, and what it runs on."""

    model: Common[str] = DEFAULT_MODEL
    """the target's converted checkpoint"""
    model_name: Annotated[str | None, arg(help_behavior_hint="(default: its folder's name)")] = None
    """name for the record; with --load_format dummy, the configuration to build"""
    load_format: Literal["pth", "dummy"] = "pth"
    """dummy: random weights, for costs only"""
    verify: bool = False
    """read all weights to check their SHA-256, remembered or not"""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N"""
    dtype: Literal["auto"] | Dtype = "auto"
    """auto: bfloat16, but float32 on a CPU without instructions for it, or of a checkpoint published in more bits"""
    quantize: Annotated[Scheme | None, arg(help_behavior_hint="(default: in --dtype)")] = None
    """the target's linear layers in 8 or 4 bits"""
    kv_dtype: Literal["same"] | KVDtype = "same"
    """entries of the target's KV cache"""
    attention: Backend = "auto"
    """attention backend; auto says which, and why"""
    compile: bool = False
    """torch.compile what lies between matrix products and attention"""
    no_cuda_graphs: bool = False
    """on a GPU, do not capture rounds as CUDA graphs"""

    def require_trained(self, what: str) -> None:
        """Raise ConfigError for random weights. what: why they will not do."""
        if self.load_format == "dummy":
            where = flag("load_format")
            raise ConfigError(what, where, "dummy", "a trained model", f"leave out {where}")

    def source(self) -> ModelSource:
        """The model, found but not loaded. Errors: UserError."""
        return find_model(self.model, self.load_format, self.model_name, flag("model"), self.verify)

    def with_text(self) -> ModelSource:
        """The same. Errors: UserError, also for random weights."""
        self.require_trained("random weights have nothing to say")
        return self.source()


@dataclass(frozen=True)
class TargetBesideDraft(Target):
    """The target model, how it is stored, and what it runs on."""

    model: Common[Annotated[str, arg(name="target", metavar="MODEL")]] = DEFAULT_MODEL
    """the target's converted checkpoint"""


@dataclass(frozen=True)
class Text:
    """What the prompts are cut from."""

    dataset: str = "auto"
    """default (the built-in book), pg19 (from the Hugging Face hub or its local cache), a .txt, .jsonl or .parquet
    file, or a folder of these; auto: default for the built-in model, pg19 for every other"""


@dataclass(frozen=True)
class Sizes:
    """How much is decoded at once."""

    B: BatchSize = DEFAULT_ROWS
    """rows decoded together"""
    prefix_len: Common[Annotated[int | None, arg(help_behavior_hint="(default: 6000)")]] = None
    """prompt tokens per row"""
    gen_len: Common[int] = 64
    """new tokens per row"""


@dataclass(frozen=True)
class Rows:
    """Which prompts, and where rows end."""

    prompts: Common[Annotated[str | None, arg(help_behavior_hint="(default: stretches of the data set)")]] = None
    """one's own prompts, whole and of any lengths, in place of stretches of a data set: a .txt file, a folder of them,
    a .jsonl or .parquet file with `prompt`, `turns` or `context` in each row, or a known set (spec-bench,
    speed-bench/SPLIT)"""
    num_prompts: Annotated[int | None, arg(help_behavior_hint="(default: B)")] = None
    """prompts in all, at least B (with --data_parallel, B of each replica)"""
    stop_at_eos: bool = False
    """end a row at the model's end token (default: fixed length)"""
    save_rows: Annotated[str | None, arg(help_behavior_hint="(default: none)")] = None
    """append each row to this file as it finishes: its tokens survive a run that does not"""


@dataclass(frozen=True)
class Sampling:
    """The distribution of the next token, and the rule by which drafts are verified."""

    temperature: Common[float] = 0.0
    """0 is greedy"""
    top_k: int = 0
    """keep the k likeliest tokens; 0 keeps all"""
    top_p: float = 1.0
    """keep the likeliest tokens until their mass reaches this"""
    seed: Annotated[int | None, arg(help_behavior_hint="(default: 0)")] = None
    """key of the random numbers"""
    verification: Common[Literal["auto", "greedy", "rejection", "coupled"]] = "auto"
    """rejection: speculative sampling, the target's distribution; coupled: the samples of plain decoding in that mode,
    token for token; auto: greedy at temperature 0, else rejection"""

    @property
    def mode(self) -> str:
        """The verification mode to resolve."""
        return self.verification


@dataclass(frozen=True)
class ComparedSampling(Sampling):
    """The distribution of the next token, and the rule by which drafts are verified."""

    verification: Common[Literal["auto", "greedy", "rejection", "coupled"]] = "auto"
    """coupled: the samples of plain decoding in that mode, token for token, so that all drafts decode one text;
    rejection: speculative sampling, other samples for each draft; auto: greedy at temperature 0, else coupled"""

    @property
    def mode(self) -> str:
        return "coupled" if self.verification == AUTO and self.temperature > 0 else self.verification


@dataclass(frozen=True)
class RankOptions:
    """Under torchrun: which ranks hold what, and how they are watched."""

    data_parallel: int = 1
    """replicas of both models, each on as many of the ranks: prompts are divided over them, and B is of each"""
    rank_group: Annotated[tuple[int, ...] | None, arg(help_behavior_hint="(default: all)")] = None
    """ranks that share the target, in shard order; of a replica, numbered from 0"""
    check_ranks: bool = False
    """compare a digest over ranks each round; stop if one differs"""
    rank_timeout: float = 600
    """seconds that a rank waits for another, also to tokenise"""


@dataclass(frozen=True)
class Output:
    """Where the record goes."""

    output: Common[Annotated[str | None, arg(help_behavior_hint="(default: none)")]] = None
    """append the JSON record to this file"""


@dataclass(frozen=True)
class Passes:
    """Which passes are made beside the speculation itself."""

    no_baseline: bool = False
    """skip plain decoding: no speedup, no comparison of rows"""
    benchmark: bool = False
    """time draft and verification steps, in a pass of their own"""
    measure_costs: bool = False
    """measure what `auto` chooses by, whatever earlier runs have measured"""


@dataclass(frozen=True)
class PlainRun:
    """A run of plain decoding. ranks: None for a program that runs on one process."""

    target: Target = field(default_factory=Target)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    rows: Rows = field(default_factory=Rows)
    sampling: Sampling = field(default_factory=Sampling)
    ranks: RankOptions | None = None
    output: Output = field(default_factory=Output)
    printoutput: bool = False
    """print every row's generated text"""

    @property
    def n_replicas(self) -> int:
        """Of the models, each with prompts of its own."""
        return self.ranks.data_parallel if self.ranks else 1


@dataclass(frozen=True)
class RunConfig(PlainRun):
    """A run. draft: None for plain decoding."""

    draft: DrafterConfig | None = None
    passes: Passes = field(default_factory=Passes)
