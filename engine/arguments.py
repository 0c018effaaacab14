"""The benchmark scripts' flags, and what they mean once `auto` is resolved."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from engine.distributed import local_rank, local_world_size
from engine.drafters import check_gamma
from engine.modes import MODES, resolve_mode
from engine.sampling import SamplingParams
from kv_cache.errors import ConfigError
from kv_cache.streaming import check_budget
from models.attention import BACKENDS
from models.convert import parse_layers
from models.default_model import DEFAULT_CHECKPOINT
from models.packed_linear import can_pack
from models.quantize import SCHEMES

DRAFTS = ("self", "ngram", "oracle")
DEFAULT_BUDGET, DEFAULT_N_SINK = 512, 4
POSITIONS = ("auto", "absolute", "cache")
FULL_BUDGET = -1
DRAFT_MODEL_FLAGS = ("draft_dtype", "draft_weights", "draft_kv_dtype")
STREAMING_FLAGS = ("draft_policy", "streamingllm_budget", "n_sink")
DRAFT_FLAGS = {
    "self, streaming": (*STREAMING_FLAGS, *DRAFT_MODEL_FLAGS, "draft_layers"),
    "self, full": ("draft_policy", *DRAFT_MODEL_FLAGS, "draft_layers"),
    "standalone, streaming": (*STREAMING_FLAGS, *DRAFT_MODEL_FLAGS, "draft_positions"),
    "standalone, full": ("draft_policy", *DRAFT_MODEL_FLAGS),
    "ngram": ("max_ngram",),
    "oracle": (),
}
OPTIONAL_DRAFT_FLAGS = tuple(dict.fromkeys(flag for flags in DRAFT_FLAGS.values() for flag in flags))
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class Parser(argparse.ArgumentParser):
    """Turns argparse's complaints into the errors that all others are, said once however many ranks there are."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            "the command line cannot be read",
            where=self.prog,
            seen=message,
            required="flags of this script",
            fix="see --help",
        )


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one: None means "not given"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def add_common_arguments(parser: argparse.ArgumentParser, target_flag: str = "--model") -> None:
    """The flags of every benchmark; the defaults run on the built-in model and book."""
    add = parser.add_argument
    default = str(DEFAULT_CHECKPOINT / "model.pth")
    add(target_flag, dest="model", metavar="MODEL", default=default, help="the target's converted checkpoint")
    add("--model_name", help="name for the record; with --load_format dummy, the configuration to build")
    add("--load_format", choices=["pth", "dummy"], default="pth", help="dummy: random weights, for costs only")
    add("--dataset", default="default", help="default, pg19, a folder of .txt, a .txt, a .jsonl or a .parquet")
    add("--B", type=int, default=8, help="rows decoded together")
    add("--prefix_len", type=int, default=6000, help="prompt tokens per row")
    add("--gen_len", type=int, default=64, help="new tokens per row")
    add("--num_prompts", type=int, help="prompts in all, at least B (default: B)")
    add(
        "--stop_at_eos",
        action="store_true",
        help="end a row at the model's end token (default: fixed length)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    add("--quantize", choices=SCHEMES, help="the target's linear layers in 8 or 4 bits (default: in --dtype)")
    add("--kv_dtype", choices=["same", *KV_DTYPES], default="same", help="entries of the target's KV cache")
    add("--attention", choices=BACKENDS, default="auto", help="attention backend; auto says which, and why")
    add("--compile", action="store_true", help="torch.compile; on a GPU rounds are also captured as CUDA graphs")
    add("--output", help="append the JSON record to this file")
    add("--save_rows", help="append each row to this file as it finishes: its tokens survive a run that does not")


def add_text_argument(parser: argparse.ArgumentParser) -> None:
    """For scripts that end in `report.finish`."""
    parser.add_argument("--printoutput", action="store_true", help="print every row's generated text")


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """For scripts that torchrun may start on several ranks."""
    add = parser.add_argument
    add("--rank_group", type=int, nargs="+", help="ranks that share the target, in shard order (default: all)")
    add("--check_ranks", action="store_true", help="compare a digest over ranks each round; stop if one differs")
    add("--rank_timeout", type=float, default=600, help="seconds that a rank waits for another, also to tokenise")


def add_standalone_arguments(parser: argparse.ArgumentParser) -> None:
    """A draft model of its own."""
    add = parser.add_argument
    add("--model", dest="draft_model", metavar="MODEL", required=True, help="the draft's converted checkpoint")
    add("--draft_ranks", type=int, nargs="+", help="ranks that share the draft (default: those of --rank_group)")
    add("--gamma", type=int, default=3, help="tokens drafted per round")
    _add_cache_arguments(parser, "the draft's cache")
    add(
        "--draft_positions",
        choices=POSITIONS,
        help="streaming: rotary positions of the text (absolute) or of the slots (cache), which never pass the "
        "budget; auto (the default): cache where the run is longer than the draft's trained context",
    )


def add_pass_arguments(parser: argparse.ArgumentParser) -> None:
    """Which passes a speculation benchmark makes beside the speculation itself."""
    add = parser.add_argument
    add("--no_baseline", action="store_true", help="skip plain decoding: no speedup, no comparison of rows")
    add("--benchmark", action="store_true", help="time draft and verification steps, in a pass of their own")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The law of the next token, and the rule by which drafts of it are judged."""
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    add("--top_p", type=float, default=1.0, help="keep the likeliest tokens until their mass reaches this")
    add("--seed", type=int, default=0, help="key of the random numbers")
    add(
        "--verification",
        choices=MODES,
        default="auto",
        help="rejection: speculative sampling, the target's distribution; coupled: the samples of plain decoding "
        "in that mode, token for token; auto: greedy at temperature 0, else rejection",
    )


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """What drafts, and how."""
    add = parser.add_argument
    add(
        "--draft",
        choices=DRAFTS,
        default="self",
        help="self: the model over a small KV cache; ngram: copies from the row's own text; "
        "oracle: the baseline's own output, which costs nothing to draft and shows the machinery's ceiling",
    )
    add("--gamma", type=int, default=3, help="tokens drafted per round")
    _add_cache_arguments(parser, "self's cache")
    add("--draft_layers", help="layers that self runs, such as 0-9,20-29: it skips the others (default: all)")
    add("--max_ngram", type=int, help="longest match that --draft ngram looks for (default: 3)")


def _add_cache_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """None: not given. A flag that is given where it has no effect is refused, see DRAFT_FLAGS."""
    add = parser.add_argument
    add("--draft_policy", choices=["streaming", "full"], help=f"what {what} keeps (default: streaming)")
    add(
        "--streamingllm_budget",
        type=int,
        help="streaming: KV entries per row, sinks included (default: 512); -1 is --draft_policy full",
    )
    add("--n_sink", type=int, help="streaming: attention sinks among them (default: 4)")
    add(
        "--draft_dtype",
        choices=["auto", "same", *DTYPES],
        help="dtype of the draft's weights and cache; same: the target's (a self-draft then shares its weights); "
        "auto (the default): bfloat16 beside a float32 target on a CPU that computes in bfloat16, else same",
    )
    add(
        "--draft_weights",
        choices=["same", *SCHEMES],
        help="the draft's linear layers in 8 or 4 bits; the target keeps its own, so the output stays what it is "
        "(default: same)",
    )
    add("--draft_kv_dtype", choices=["same", *KV_DTYPES], help="entries of the draft's KV cache (default: same)")


@dataclass(frozen=True)
class Sampling:
    """How the run's tokens are chosen, and the verification mode with `auto` resolved."""

    params: SamplingParams
    mode: str

    @property
    def reproducible(self) -> bool:
        """Whether speculation emits the very tokens of the baseline, not only tokens of their distribution."""
        return self.params.greedy or self.mode == "coupled"


GREEDY = Sampling(SamplingParams(), "greedy")


@dataclass(frozen=True)
class DraftSettings:
    """What drafts. `self` and `standalone` have a KV cache: `capacity` entries a row, weights and cache in `dtype`.

    positions: "absolute" or "cache", or "auto" until the draft's trained context is known. layers: those of
    the target that `self` runs, None for all. model: where a standalone draft comes from. quantize: the scheme
    of its linear layers, kv_dtype that of its cache's entries; None for `dtype`.
    """

    kind: str
    gamma: int
    policy: str | None = None
    capacity: int = 0
    n_sink: int | None = None
    dtype: torch.dtype | None = None
    max_ngram: int | None = None
    positions: str | None = None
    layers: tuple[int, ...] | None = None
    quantize: str | None = None
    kv_dtype: torch.dtype | None = None
    model: str | None = None


def sampling_settings(args: argparse.Namespace) -> Sampling:
    """The sampling flags, checked. Errors: ConfigError naming the flag."""
    params = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed)
    if params.greedy and params.filters:
        raise ConfigError(
            "a filter has no effect on greedy decoding",
            where="--top_k, --top_p",
            seen=f"top_k {params.top_k}, top_p {params.top_p} at temperature 0",
            required="a temperature above 0",
            fix="add --temperature, or leave out --top_k and --top_p",
        )
    return Sampling(params, resolve_mode(args.verification, [params]))


def draft_settings(args: argparse.Namespace) -> DraftSettings:
    """The draft flags, checked, with defaults, `auto` and the full policy's capacity resolved."""
    require_at_least("gamma", args.gamma, 0)
    policy = _draft_policy(args)
    _refuse_without_effect(args, f"{args.draft}, {policy}" if args.draft == "self" else args.draft)
    if args.draft == "ngram":
        max_ngram = 3 if args.max_ngram is None else args.max_ngram
        require_at_least("max_ngram", max_ngram, 1)
        return DraftSettings("ngram", args.gamma, max_ngram=max_ngram)
    if args.draft == "oracle":
        if args.no_baseline:
            raise ConfigError(
                "an oracle drafts the baseline's output, and there is none",
                where="--draft oracle",
                seen="--no_baseline",
                required="a baseline pass",
                fix="leave out --no_baseline",
            )
        return DraftSettings("oracle", args.gamma)
    layers = None if args.draft_layers is None else tuple(parse_layers(args.draft_layers, "--draft_layers"))
    return replace(_with_cache(args, "self", policy), layers=layers)


def standalone_settings(args: argparse.Namespace) -> DraftSettings:
    """The flags of a standalone draft, checked; its positions stay "auto" until its context is known."""
    require_at_least("gamma", args.gamma, 0)
    policy = _draft_policy(args)
    _refuse_without_effect(args, f"standalone, {policy}")
    positions = (args.draft_positions or "auto") if policy == "streaming" else "absolute"
    return replace(_with_cache(args, "standalone", policy), positions=positions, model=args.draft_model)


def _draft_policy(args: argparse.Namespace) -> str:
    """`--draft_policy`, or what the budget says of it."""
    if args.streamingllm_budget == FULL_BUDGET:
        if args.draft_policy == "streaming":
            raise ConfigError(
                "a budget of -1 keeps everything",
                where="--streamingllm_budget",
                seen="-1 with --draft_policy streaming",
                required="a budget of entries, or --draft_policy full",
                fix="leave out --draft_policy",
            )
        return "full"
    return args.draft_policy or "streaming"


def _with_cache(args: argparse.Namespace, kind: str, policy: str) -> DraftSettings:
    """A draft with a KV cache, its size and dtypes checked."""
    dtype = resolve_draft_dtype(args, args.draft_dtype or "auto")
    # A self-draft is the target, so `same` takes over how the target's weights are stored.
    same = args.quantize if kind == "self" else None
    quantize = same if args.draft_weights in (None, "same") else args.draft_weights
    wanted = args.draft_kv_dtype or "same"
    kv_dtype = resolve_kv_dtype(args.kv_dtype if kind == "self" and wanted == "same" else wanted, dtype)
    if policy == "full":
        capacity = args.prefix_len + args.gen_len + args.gamma + 1
        return DraftSettings(kind, args.gamma, "full", capacity, dtype=dtype, quantize=quantize, kv_dtype=kv_dtype)
    budget = DEFAULT_BUDGET if args.streamingllm_budget is None else args.streamingllm_budget
    n_sink = DEFAULT_N_SINK if args.n_sink is None else args.n_sink
    check_budget(budget, n_sink)
    check_gamma(args.gamma, budget - n_sink)
    return DraftSettings(
        kind, args.gamma, "streaming", budget, n_sink, dtype=dtype, quantize=quantize, kv_dtype=kv_dtype
    )


def _refuse_without_effect(args: argparse.Namespace, draft: str) -> None:
    """Raise ConfigError if a draft flag is given that this draft does not look at."""
    for flag in OPTIONAL_DRAFT_FLAGS:
        given = getattr(args, flag, None)
        asks_for_all = flag == "streamingllm_budget" and given == FULL_BUDGET and draft.endswith("full")
        if given is not None and flag not in DRAFT_FLAGS[draft] and not asks_for_all:
            raise ConfigError(
                "a draft flag has no effect on this draft",
                where=f"--{flag}",
                seen=f"{getattr(args, flag)} with draft {draft}"
                + (" (--streamingllm_budget -1)" if args.streamingllm_budget == FULL_BUDGET else ""),
                required=f"draft {draft} takes only "
                + ", ".join(f"--{name}" for name in ("gamma", *DRAFT_FLAGS[draft])),
                fix=f"leave out --{flag}",
            )


def resolve_draft_dtype(args: argparse.Namespace, wanted: str) -> torch.dtype:
    """The dtype of the draft's weights and cache that `wanted` means beside the target's."""
    device = resolve_device(args.device)
    dtype = resolve_dtype(args, device)
    if wanted == "auto" and dtype == torch.float32 and can_pack(device, torch.bfloat16):
        return torch.bfloat16
    return dtype if wanted in ("auto", "same") else DTYPES[wanted]


def resolve_kv_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """That of a cache's entries; `same` is the model's."""
    return KV_DTYPES.get(wanted, dtype)


def resolve_dtype(args: argparse.Namespace, device: str) -> torch.dtype:
    if args.dtype != "auto":
        return DTYPES[args.dtype]
    return torch.float32 if device == "cpu" else torch.bfloat16


def require_at_least(flag: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(
            f"--{flag} is too small",
            where=f"--{flag}",
            seen=value,
            required=f">= {minimum}",
            fix=f"use --{flag} {minimum} or more",
        )


def resolve_device(name: str) -> str:
    n_gpus, n_processes = torch.cuda.device_count(), local_world_size()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and n_gpus and n_processes > 1:
        if name != "cuda" or n_processes > n_gpus:
            raise ConfigError(
                "every process needs a GPU of its own",
                where="--device, torchrun --nproc_per_node",
                seen=f"{name}, {n_processes} processes on a machine with {n_gpus} GPUs",
                required=f"--device cuda, and at most {n_gpus} processes",
                fix=f"use --device cuda and --nproc_per_node={min(n_gpus, n_processes)}",
            )
        return f"cuda:{local_rank()}"
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = "unknown"
    if kind == "cpu":
        return "cpu"
    if kind != "cuda" or (torch.device(name).index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            "the device is not available",
            where="--device",
            seen=name,
            required="cpu" + (" or cuda" if torch.cuda.is_available() else " (this PyTorch sees no CUDA device)"),
            fix="use --device auto",
        )
    return name
