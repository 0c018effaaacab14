"""Rotary position embedding in the half-split layout, with the field's ways to extend the context."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig, RopeScaling


class Rotation(NamedTuple):
    """Cosines and sines of positions, `[..., 1, head_dim]`; half of the sines are negated, so `rotate` only adds."""

    cos: Tensor
    signed_sin: Tensor


class Rope(NamedTuple):
    """The radians per position of each pair of a head, and the factor of its cosine and sine, `[head_dim / 2]`."""

    frequencies: Tensor
    amplitudes: Tensor


def rope_of(config: ModelConfig) -> Rope:
    """Return a model's rope in float32. Pairs that are not rotated have frequency 0 and amplitude 1."""
    frequencies = inverse_frequencies(config)
    amplitudes = torch.full_like(frequencies, config.rope_scaling.attention_factor if config.rope_scaling else 1.0)
    still = (config.head_dim - len(frequencies) * 2) // 2
    return Rope(F.pad(frequencies, (0, still)), F.pad(amplitudes, (0, still), value=1.0))


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Compute radians per position of each rotated pair, `[rotary_dim / 2]` float32 (RoFormer, arXiv 2104.09864)."""
    rotary_dim = config.rotary_dim or config.head_dim
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        return frequencies / torch.tensor(scaling.divisors, dtype=torch.float32, device="cpu")
    if scaling.kind == "yarn":
        keep = _yarn_ramp(scaling, config.rope_theta, rotary_dim)
    else:  # Llama 3: wavelengths beyond the original context are divided, with a ramp between the two corners
        turns = scaling.original_context * frequencies / (2 * math.pi)
        ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = ramp.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def _yarn_ramp(scaling: RopeScaling, theta: float, rotary_dim: int) -> Tensor:
    """Return how much of each pair's frequency YaRN keeps, from 1 at high frequencies to 0, `[rotary_dim / 2]`."""

    def pair_of(turns: float) -> float:
        """Return the pair, a fraction, that turns so often over the original context."""
        return rotary_dim * math.log(scaling.original_context / (2 * math.pi * turns)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float32, device="cpu")
    return 1 - ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)


def rotation(positions: Tensor, rope: Rope, dtype: torch.dtype) -> Rotation:
    """Compute cos and sin of `positions [...]` in `dtype`, from angles in float32 or better."""
    angles = positions[..., None].to(torch.promote_types(dtype, torch.float32)) * rope.frequencies
    cos, sin = angles.cos() * rope.amplitudes, angles.sin() * rope.amplitudes
    return Rotation(*(torch.cat(halves, -1)[..., None, :].to(dtype) for halves in ([cos, cos], [-sin, sin])))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of `x [..., H, head_dim]`."""
    return torch.addcmul(x * by.cos, x.roll(x.shape[-1] // 2, -1), by.signed_sin)
