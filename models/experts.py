"""Products of a mixture of experts: every token's states with the weights of the experts that the router chose."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def route(scores: Tensor, n_chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """Return shares and indices of each token's experts, both `[N, n_chosen]`, from `scores [N, n_expert]`. Shares are
    softmax probabilities in float32 or better, divided by their sum if `normalised` (arXiv 2505.09388)."""
    shares, chosen = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).topk(n_chosen)
    shares = shares / shares.sum(dim=-1, keepdim=True) if normalised else shares
    return shares.to(scores.dtype), chosen


def grouped(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply `x [M, d_in]`, sorted by expert, `counts [E]` rows each, by transposed `weights [E, d_out, d_in]`."""
    return F.grouped_mm(x, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


def looped(x: Tensor, experts: Iterable[Callable[[Tensor], Tensor]], counts: Tensor) -> Tensor:
    """Compute `grouped` expert by expert, in any dtype. experts: linear layers of their weights."""
    parts = zip(x.split(counts.tolist()), experts, strict=True)
    return torch.cat([expert(part) for part, expert in parts if len(part)])


def is_grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch has a kernel for `grouped`, which reads no count on the host and so can be captured."""
    return device.type == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


class StackedExperts(nn.Module):
    """The weights of all experts, one below the other; `weight [n_expert * d_out, d_in]`."""

    def __init__(self, n_expert: int, d_in: int, d_out: int) -> None:
        super().__init__()
        self.n_expert = n_expert
        self.weight = nn.Parameter(torch.empty(n_expert * d_out, d_in))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        weights = self.weight.unflatten(0, (self.n_expert, -1))
        if is_grouped(x.device, x.dtype):
            return grouped(x, weights, counts)
        return looped(x, (partial(F.linear, weight=weight) for weight in weights), counts)
