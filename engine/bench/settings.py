"""What the benchmarks' flags mean once `auto` and defaults are resolved: sampling, drafts, dtypes, devices."""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from common.errors import ConfigError
from common.process import local_rank, local_world_size
from engine.drafters import check_gamma
from engine.modes import resolve_mode
from engine.sampling import SamplingParams
from kv_cache.snapkv import check_snapkv
from kv_cache.streaming import check_budget
from models.checkpoints.convert import parse_layers
from models.packed_linear import can_pack

DRAFTS = ("self", "ngram", "oracle")
POLICIES = ("full", "streaming", "snapkv")
DEFAULT_BUDGET, DEFAULT_N_SINK, DEFAULT_SNAPKV_WINDOW = 512, 4, 32
POSITIONS = ("auto", "absolute", "cache")
FULL_BUDGET = -1
AUTO = "auto"
# The most that `--gamma auto` drafts, and the budgets that `--draft_budget auto` chooses among.
AUTO_GAMMA = 6
AUTO_BUDGETS = (64, 128, 256, 512, 1024)
DRAFT_MODEL_FLAGS = ("draft_dtype", "draft_weights", "draft_kv_dtype")
CACHE_FLAGS = {
    "full": ("draft_policy",),
    "streaming": ("draft_policy", "streamingllm_budget", "n_sink"),
    "snapkv": ("draft_policy", "streamingllm_budget", "snapkv_window"),
}
DRAFT_FLAGS = {
    **{f"self, {policy}": (*flags, *DRAFT_MODEL_FLAGS, "draft_layers") for policy, flags in CACHE_FLAGS.items()},
    **{f"standalone, {policy}": (*flags, *DRAFT_MODEL_FLAGS) for policy, flags in CACHE_FLAGS.items()},
    "ngram": ("max_ngram",),
    "oracle": (),
}
DRAFT_FLAGS["standalone, streaming"] += ("draft_positions",)
OPTIONAL_DRAFT_FLAGS = tuple(dict.fromkeys(flag for flags in DRAFT_FLAGS.values() for flag in flags))
# Flags with two names: the older one, which the parsed flags go by, and the one for messages.
NEWER_NAMES = {"streamingllm_budget": "draft_budget"}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


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

    gamma: what every round drafts, or with `auto_gamma` the most that one may. n_sink goes with the streaming
    policy, window with snapkv. budgets: what `--draft_budget auto` chooses among, each in a cache of its own;
    `capacity` is then the largest. positions: "absolute" or "cache", or "auto" until the draft's trained context
    is known. layers: those of the target that `self` runs, None for all. model: where a standalone draft comes
    from. quantize: the scheme of its linear layers, kv_dtype that of its cache's entries; None for `dtype`.
    """

    kind: str
    gamma: int
    auto_gamma: bool = False
    policy: str | None = None
    capacity: int = 0
    budgets: tuple[int, ...] = ()
    n_sink: int | None = None
    window: int | None = None
    dtype: torch.dtype | None = None
    max_ngram: int | None = None
    positions: str | None = None
    layers: tuple[int, ...] | None = None
    quantize: str | None = None
    kv_dtype: torch.dtype | None = None
    model: str | None = None

    @property
    def capacities(self) -> tuple[int, ...]:
        """KV entries a row of each drafter, in the order of the drafters: the largest first."""
        return tuple(sorted(self.budgets, reverse=True)) or (self.capacity,)

    @property
    def gammas(self) -> tuple[int, ...]:
        """Those of the rounds that draft, ascending."""
        return tuple(range(1, self.gamma + 1)) if self.auto_gamma else (self.gamma,)

    @property
    def automatic(self) -> bool:
        """Whether anything is chosen from round to round."""
        return self.auto_gamma or bool(self.budgets)


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
    policy = _draft_policy(args)
    _refuse_without_effect(args, f"{args.draft}, {policy}" if args.draft == "self" else args.draft)
    if args.draft == "self":
        layers = None if args.draft_layers is None else tuple(parse_layers(args.draft_layers, "--draft_layers"))
        return replace(_with_cache(args, "self", policy), layers=layers)
    gamma, auto_gamma = _gamma(args, AUTO_GAMMA)
    if args.draft == "ngram":
        max_ngram = 3 if args.max_ngram is None else args.max_ngram
        require_at_least("max_ngram", max_ngram, 1)
        return DraftSettings("ngram", gamma, auto_gamma, max_ngram=max_ngram)
    if args.no_baseline:
        raise ConfigError(
            "an oracle drafts the baseline's output, and there is none",
            where="--draft oracle",
            seen="--no_baseline",
            required="a baseline pass",
            fix="leave out --no_baseline",
        )
    return DraftSettings("oracle", gamma, auto_gamma)


def standalone_settings(args: argparse.Namespace) -> DraftSettings:
    """The flags of a standalone draft, checked; its positions stay "auto" until its context is known."""
    policy = _draft_policy(args)
    _refuse_without_effect(args, f"standalone, {policy}")
    if args.streamingllm_budget == AUTO:
        raise ConfigError(
            "a standalone draft cannot change its budget: its cache would have to be prefilled again",
            where="--draft_budget",
            seen=AUTO,
            required="a number of entries",
            fix="compare budgets with reproduce/acceptance.py --draft_model D --budgets 64 256, and name one",
        )
    positions = (args.draft_positions or "auto") if policy == "streaming" else "absolute"
    return replace(_with_cache(args, "standalone", policy), positions=positions, model=args.draft_model)


def variant_flags(
    args: argparse.Namespace, policy: str, budget: int | str | None, gamma: int | str
) -> dict[str, object]:
    """The draft flags of one of several drafts: sinks and window only where the policy knows them."""
    return {
        "draft_policy": policy,
        "streamingllm_budget": None if policy == "full" else budget,
        "gamma": gamma,
        "n_sink": args.n_sink if policy == "streaming" else None,
        "snapkv_window": args.snapkv_window if policy == "snapkv" else None,
    }


def with_flags(args: argparse.Namespace, flags: Mapping[str, object]) -> argparse.Namespace:
    """The same flags but for these. AttributeError for one that there is not."""
    changed = copy.copy(args)
    for name, value in flags.items():
        getattr(changed, name)
        setattr(changed, name, value)
    return changed


def _gamma(args: argparse.Namespace, most: int) -> tuple[int, bool]:
    """The largest gamma of any round, and whether rounds choose their own."""
    if args.gamma == AUTO:
        return min(AUTO_GAMMA, most), True
    require_at_least("gamma", args.gamma, 0)
    return args.gamma, False


def _draft_policy(args: argparse.Namespace) -> str:
    """`--draft_policy`, or what the budget says of it."""
    if args.streamingllm_budget == FULL_BUDGET:
        if args.draft_policy in ("streaming", "snapkv"):
            raise ConfigError(
                "a budget of -1 keeps everything",
                where="--draft_budget (--streamingllm_budget)",
                seen=f"-1 with --draft_policy {args.draft_policy}",
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
    wanted = args.draft_kv_dtype or "same"
    stored = DraftSettings(
        kind,
        gamma=0,
        policy=policy,
        dtype=dtype,
        quantize=same if args.draft_weights in (None, "same") else args.draft_weights,
        kv_dtype=resolve_kv_dtype(args.kv_dtype if kind == "self" and wanted == "same" else wanted, dtype),
    )
    if policy == "full":
        gamma, auto_gamma = _gamma(args, AUTO_GAMMA)
        capacity = args.prefix_len + args.gen_len + gamma + 1
        return replace(stored, gamma=gamma, auto_gamma=auto_gamma, capacity=capacity)
    n_sink = window = None
    if policy == "streaming":
        n_sink = DEFAULT_N_SINK if args.n_sink is None else args.n_sink
    else:
        window = DEFAULT_SNAPKV_WINDOW if args.snapkv_window is None else args.snapkv_window
    budgets = _budgets(args, window if n_sink is None else n_sink)
    if n_sink is not None:
        check_budget(budgets[0], n_sink)
    elif window is not None:
        check_snapkv(budgets[0], window)
    room = budgets[0] - n_sink if n_sink is not None else window or 0
    gamma, auto_gamma = _gamma(args, room - 1)
    check_gamma(gamma, room)
    return replace(
        stored,
        gamma=gamma,
        auto_gamma=auto_gamma,
        capacity=budgets[-1],
        budgets=budgets if args.streamingllm_budget == AUTO else (),
        n_sink=n_sink,
        window=window,
    )


def _budgets(args: argparse.Namespace, reserved: int | None) -> tuple[int, ...]:
    """The one budget, or those that `auto` chooses among: shorter than the prompt, with room beside `reserved`."""
    if args.streamingllm_budget == AUTO:
        return tuple(b for b in AUTO_BUDGETS if 2 * (reserved or 0) < b < args.prefix_len) or AUTO_BUDGETS[:1]
    return (DEFAULT_BUDGET if args.streamingllm_budget is None else args.streamingllm_budget,)


def _refuse_without_effect(args: argparse.Namespace, draft: str) -> None:
    """Raise ConfigError if draft flags are given that this draft does not look at."""
    asks_for_all = args.streamingllm_budget == FULL_BUDGET and draft.endswith("full")
    given = [flag for flag in OPTIONAL_DRAFT_FLAGS if getattr(args, flag, None) is not None]
    useless = [
        flag
        for flag in given
        if flag not in DRAFT_FLAGS[draft] and not (asks_for_all and flag == "streamingllm_budget")
    ]
    if useless:
        values = ", ".join(str(getattr(args, flag)) for flag in useless)
        raise ConfigError(
            "a draft flag has no effect on this draft",
            where=", ".join(map(_flag_and_alias, useless)),
            seen=f"{values} with draft {draft}"
            + (" (--draft_budget -1)" if args.streamingllm_budget == FULL_BUDGET else ""),
            required=f"draft {draft} takes only " + ", ".join(map(_flag, ("gamma", *DRAFT_FLAGS[draft]))),
            fix=f"leave out {' and '.join(map(_flag, useless))}",
        )


def _flag(name: str) -> str:
    """The flag of that name, as messages call it."""
    return f"--{NEWER_NAMES.get(name, name)}"


def _flag_and_alias(name: str) -> str:
    """The same, and its older name if it has one: whichever the user typed."""
    return _flag(name) + (f" (--{name})" if name in NEWER_NAMES else "")


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
    """`name` as "cpu" or "cuda:N", N being this process's own GPU where a machine runs several of them.

    A process that was left one GPU to see, as by Slurm's --gpus-per-task=1, finds it at 0, whatever its local rank.
    """
    n_gpus, n_processes = torch.cuda.device_count(), local_world_size()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or (device.index or 0) >= n_gpus:
        raise ConfigError(
            "the device is not available",
            where="--device",
            seen=name,
            required="cpu" + (" or cuda" if torch.cuda.is_available() else " (this PyTorch sees no CUDA device)"),
            fix="use --device auto",
        )
    if n_processes == 1:
        return f"cuda:{device.index or 0}"
    is_masked = n_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if device.index is not None or (n_processes > n_gpus and not is_masked):
        raise ConfigError(
            "every process needs a GPU of its own",
            where="--device, torchrun --nproc_per_node",
            seen=f"{name}, {n_processes} processes on a machine with {n_gpus} GPUs",
            required=f"--device cuda, and at most {n_gpus} processes",
            fix=f"use --device cuda and --nproc_per_node={min(n_gpus, n_processes)}",
        )
    return f"cuda:{0 if is_masked else local_rank()}"
