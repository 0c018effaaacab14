"""Cases that check the kernel of top-k and top-p."""

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.sampling.distribution import Distribution, Filter, SamplingParams, filtered_by
from models.kernels.check import Case, Results

ROWS = [SamplingParams(0.6, *filters) for filters in ((0, 0.95), (20, 1.0), (50, 0.5), (0, 1.0), (1, 0.1), (7, 0.999))]
N_IDS = 9001  # so that the last vector is not full

candidate = filtered_by


def cases() -> Iterator[Case]:
    """Yield cases in which logits are alike, and in which all are; what is kept is that of PyTorch's path."""
    law, generator = Distribution.of(ROWS), torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(len(ROWS), 2, N_IDS, generator=generator).bfloat16().float()
    logits[..., ::9] = -torch.inf
    for scaled in (logits - logits.amax(dim=-1, keepdim=True), torch.zeros(len(ROWS), 1, 35)):

        def compute(run: Filter, scaled: Tensor = scaled) -> Results:
            return (run(scaled, law.top_k, law.top_p).isfinite().double(),)

        kept = law.kept(scaled) & scaled.isfinite()
        yield Case("top-k and top-p", 0.0, compute, (kept.double(),))
