"""Devices, dtypes, sampling and drafts of a run with every `auto` resolved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bench.config import AUTO, Sampling, Target
from common.errors import ConfigError, flag
from common.process import local_rank, local_world_size
from common.say import note_without_effect
from engine.drafters import check_gamma
from engine.drafters.config import DrafterConfig, ModelDrafterConfig
from engine.drafters.self_speculation import SelfConfig
from engine.modes import resolve_mode
from engine.sampling import SamplingParams
from kv_cache.policy import Policy
from models.checkpoints.model_source import ModelSource
from models.packed_linear import can_pack
from models.quantize import takes_shape

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Dtypes of which bfloat16 rounds numbers away.
WIDER = {"float64", "float32", "float16"}
# The most that `--gamma auto` drafts.
AUTO_GAMMA = 6


@dataclass(frozen=True)
class ResolvedSampling:
    """How the run's tokens are chosen, and the verification mode."""

    params: SamplingParams
    mode: str

    @property
    def reproducible(self) -> bool:
        """Whether speculation emits the very tokens of the baseline, not only tokens of their distribution."""
        return self.params.greedy or self.mode == "coupled"


@dataclass(frozen=True)
class ResolvedDraft:
    """What drafts, and how far. One with a model has weights in `dtype`, and a KV cache of each of its policies.

    gamma: what every round drafts, or with `auto_gamma` the most that one may. policies: several are what is chosen
    among, the largest budgets first. capacities: KV entries a row of each. quantize: the scheme of the linear layers.
    source: of a model that is not the target. inner: what drafts for it.
    """

    config: DrafterConfig
    gamma: int
    auto_gamma: bool = False
    policies: tuple[Policy, ...] = ()
    capacities: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    quantize: str | None = None
    kv_dtype: torch.dtype | None = None
    source: ModelSource | None = None
    inner: ResolvedDraft | None = None

    @property
    def kind(self) -> str:
        return self.config.name

    @property
    def policy(self) -> Policy | None:
        return self.policies[0] if self.policies else None

    @property
    def capacity(self) -> int:
        return max(self.capacities, default=0)

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Those of the target that a self-draft runs; None for all."""
        return self.config.layers if isinstance(self.config, SelfConfig) else None

    @property
    def levels(self) -> tuple[ResolvedDraft, ...]:
        """Itself, and what drafts for it."""
        return (self, *self.inner.levels) if self.inner else (self,)

    @property
    def form(self) -> tuple[object, ...]:
        """What drafts of a session with the same model share."""
        return self.source, self.dtype, self.quantize, self.layers

    @property
    def gammas(self) -> tuple[int, ...]:
        """Those of the rounds that draft, ascending."""
        return tuple(range(1, self.gamma + 1)) if self.auto_gamma else (self.gamma,)

    @property
    def automatic(self) -> bool:
        """Whether anything is chosen from round to round."""
        return self.auto_gamma or self.auto_policy or self.auto_budget

    @property
    def auto_policy(self) -> bool:
        return isinstance(self.config, ModelDrafterConfig) and bool(self.config.policies)

    @property
    def auto_budget(self) -> bool:
        return isinstance(self.config, ModelDrafterConfig) and self.config.auto_budget

    def each(self) -> list[ResolvedDraft]:
        """One draft for each policy, in their order; of those without a cache the one."""
        pairs = zip(self.policies, self.capacities, strict=True)
        return [replace(self, policies=(one,), capacities=(n,)) for one, n in pairs] or [self]


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16, which oneDNN emulates on others. One with AMX has
    these, too."""
    return bool(torch.cpu._is_avx512_bf16_supported())


def auto_dtype(device: str, source: ModelSource) -> tuple[torch.dtype, str]:
    """Return what `--dtype auto` is, and why: on a CPU the fastest dtype that rounds off no more than publishing the
    model did."""
    if device != "cpu":
        return torch.bfloat16, "on a GPU"
    if not multiplies_bfloat16():
        return torch.float32, "this CPU has no instructions for products of bfloat16"
    if not source.has_text:
        return torch.bfloat16, "which this CPU multiplies; random weights"
    published = source.published
    if wider := WIDER.intersection(published):
        return torch.float32, f"published in {' and '.join(sorted(wider))}"
    if not published:
        return torch.float32, "the conversion does not say how the model was published; convert it again"
    return torch.bfloat16, f"which this CPU multiplies; published in {' and '.join(published)}"


def auto_draft_weights(
    draft: ModelDrafterConfig,
    target: Target,
    device: str,
    dtype: torch.dtype,
    linears: Sequence[tuple[int, ...]],
    published: Sequence[str] = (),
) -> str:
    """Return what `--draft_weights auto` is: the fastest scheme that costs little acceptance, or "same". 4 bits are
    faster than 8, but a model that was not published in them loses more by them.

    dtype: the draft's. linears: the shapes `(d_out, d_in)` of its linear layers, as ranks hold them; none of a head.
    published: see `ModelSource.published`.
    """
    is_named = draft.draft_dtype != AUTO or target.quantize is not None
    if device != "cpu" or is_named or dtype not in (torch.float32, torch.bfloat16):
        return "same"
    had_4_bits = any(name.startswith(("Q4", "IQ4")) for name in published)
    scheme = "int4" if had_4_bits and multiplies_bfloat16() else "int8"  # PyTorch's kernel for 4 bits is slower
    fits = bool(linears) and all(takes_shape(shape, scheme) for shape in linears)
    return scheme if fits and torch.cpu._is_vnni_supported() else "same"


def resolve_device(name: str) -> str:
    """`name` as "cpu" or "cuda:N", N being this process's own GPU where a machine runs several of them. One that was
    left one GPU to see, as by Slurm's --gpus-per-task=1, finds it at 0, whatever its local rank."""
    n_gpus, n_processes = torch.cuda.device_count(), local_world_size()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return "cpu"
    where = flag("device")
    if device.type != "cuda" or (device.index or 0) >= n_gpus:
        required = "cpu" + (" or cuda" if torch.cuda.is_available() else " (this PyTorch sees no CUDA device)")
        raise ConfigError("the device is not available", where, name, required, f"use {where} auto")
    if n_processes == 1:
        return f"cuda:{device.index or 0}"
    is_masked = n_gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if device.index is not None or (n_processes > n_gpus and not is_masked):
        what, where = "every process needs a GPU of its own", "--device, torchrun --nproc_per_node"
        seen = f"{name}, {n_processes} processes on a machine with {n_gpus} GPUs"
        fix = f"use --device cuda and --nproc_per_node={min(n_gpus, n_processes)}"
        raise ConfigError(what, where, seen, f"--device cuda, and at most {n_gpus} processes", fix)
    return f"cuda:{0 if is_masked else local_rank()}"


def resolve_sampling(sampling: Sampling) -> ResolvedSampling:
    """Errors: ConfigError for what cannot be verified in that mode."""
    params = SamplingParams(sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed or 0)
    given = {"top_k": params.top_k > 0, "top_p": params.top_p < 1, "seed": sampling.seed is not None}
    if params.greedy and any(given.values()):
        note_without_effect([name for name, is_given in given.items() if is_given], "temperature 0 is greedy")
        params = SamplingParams()
    return ResolvedSampling(params, resolve_mode(sampling.mode, [params]))


def resolve_draft(draft: DrafterConfig, prefix_len: int, gen_len: int) -> ResolvedDraft:
    """Return a draft's budgets and its largest gamma; positions stay `auto` until the draft model's context is known.
    How it is stored is left open. Errors: ConfigError."""
    draft.check()
    auto_gamma = draft.gamma == AUTO
    if not isinstance(draft, ModelDrafterConfig):
        return ResolvedDraft(draft, AUTO_GAMMA if auto_gamma else int(draft.gamma), auto_gamma)
    if not isinstance(draft, SelfConfig) and (draft.policies or draft.auto_budget):
        what = "a draft with a model of its own cannot change its cache, which would have to be prefilled again"
        fix = "compare with reproduce/acceptance.py --draft_model D --policies streaming snapkv --budgets 64 256"
        where = flag("draft_policy" if draft.policies else "draft_budget")
        raise ConfigError(what, where, AUTO, "a policy and a number of entries", f"{fix}, and name one")
    if (draft.policies or draft.auto_budget) and any(getattr(text, "ngram_cache", None) for text in draft.texts):
        what, where = "each of the drafts that are chosen among would save its own n-grams", flag("ngram_cache")
        raise ConfigError(what, where, f"a file beside {AUTO}", "one policy and one budget", f"leave out {where}")
    each = [one for policy in draft.policies or (draft.policy,) for one in policy.alternatives(prefix_len)]
    for policy in each:
        policy.check()
    narrowest = min(each, key=lambda policy: policy.room)
    gamma = min(AUTO_GAMMA, narrowest.room - 1) if auto_gamma else int(draft.gamma)
    check_gamma(gamma, narrowest.room)
    length = prefix_len + gen_len + gamma + 1
    each.sort(key=lambda policy: -policy.entries(length))
    return ResolvedDraft(draft, gamma, auto_gamma, tuple(each), tuple(policy.entries(length) for policy in each))


def store_draft(
    draft: ResolvedDraft,
    target: Target,
    device: str,
    dtype: torch.dtype,
    linears: Sequence[tuple[int, ...]],
    published: Sequence[str],
) -> ResolvedDraft:
    """Return the draft with how its weights and its KV entries are stored. dtype: the target's. linears, published: as
    of `auto_draft_weights`."""
    config = draft.config
    if not isinstance(config, ModelDrafterConfig):
        return draft
    own = DTYPES.get(config.draft_dtype, dtype)
    if config.draft_dtype == AUTO and dtype == torch.float32 and can_pack(device, torch.bfloat16):
        own = torch.bfloat16
    entries, weights = config.draft_kv_dtype, str(config.draft_weights)
    if weights == AUTO:
        weights = auto_draft_weights(config, target, device, own, linears, published)
    # A self-draft is the target, so `same` takes over how the target's weights and entries are stored.
    is_target = isinstance(config, SelfConfig)
    quantize = weights if weights != "same" else target.quantize if is_target else None
    kv_dtype = KV_DTYPES.get(target.kv_dtype if is_target and entries == "same" else entries, own)
    return replace(draft, dtype=own, quantize=quantize, kv_dtype=kv_dtype)
