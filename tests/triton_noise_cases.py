"""The Triton kernel's random numbers against PyTorch's, in Triton's interpreter; run by test_noise.py in a process of
its own, as triton_cases.py is."""

import pytest
import torch

from engine.noise import Stream, gumbel, uniform
from engine.triton_noise import PAIRS, draw

SEEDS, REQUESTS = (torch.tensor(x)[:, None] for x in ([0, -1, 2**62 + 1, -(2**63)], [7, 2**32 - 1, 0, 5]))
KEYS = SEEDS, REQUESTS, torch.tensor([[0, 2**32 - 1, 31_999]])


@pytest.mark.parametrize("stream", [*Stream, Stream.ACCEPT + (len(Stream) * 3 << 16), 2**32 - 1])
@pytest.mark.parametrize("n_ids", [1, 2, 7, 2 * PAIRS, 6 * PAIRS + 3])
def test_numbers_are_those_of_pytorch(stream, n_ids):
    """Two libraries' logarithms may differ in the last bit; the float32 numbers do not."""
    given = *KEYS, stream, n_ids
    assert torch.equal(draw(*given), uniform(*given))
    assert torch.equal(draw(*given, torch.float32), gumbel(*given, torch.float64).float())
    exact = gumbel(*given, torch.float64)
    torch.testing.assert_close(draw(*given, torch.float64), exact, rtol=1e-14, atol=1e-15)


def test_no_rows_are_no_numbers():
    assert draw(*(torch.empty(3, 0, dtype=torch.int64),) * 3, Stream.ACCEPT, 1).shape == (3, 0, 1)
