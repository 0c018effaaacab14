"""Rotary position embedding in the half-split layout, with linear and Llama-3 frequency scaling."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from models.config import ModelConfig


class Rotation(NamedTuple):
    """Cosines and sines of positions, `[..., 1, head_dim]`; half of the sines are negated, so `rotate` only adds."""

    cos: Tensor
    signed_sin: Tensor


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Compute the radians per position of each rotated pair, `[head_dim / 2]` float32 (RoFormer, arXiv 2104.09864)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: divide the frequencies of wavelengths beyond the original context; a ramp between the two corners.
    turns = scaling.original_context * frequencies / (2 * math.pi)
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = ramp.clamp(0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotation(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
    """Compute cos and sin of `positions [...]` in `dtype`, from angles in float32 or better."""
    angles = positions[..., None].to(torch.promote_types(dtype, torch.float32)) * frequencies
    cos, sin = angles.cos(), angles.sin()
    return Rotation(*(torch.cat(halves, -1)[..., None, :].to(dtype) for halves in ([cos, cos], [-sin, sin])))


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate the pairs (x[i], x[i + head_dim / 2]) of `x [..., H, head_dim]`."""
    return torch.addcmul(x * by.cos, x.roll(x.shape[-1] // 2, -1), by.signed_sin)
