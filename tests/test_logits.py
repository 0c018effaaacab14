"""Logits keep float32 where a GPU's matrix product can: in 16 bits near ones would tie. Without a GPU."""

from dataclasses import replace

import pytest
import torch
from tiny import TINY

from models import llama
from models.llama import Transformer, logits_dtype

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_whose_logits_are_wider_than_the_model():
    assert {logits_dtype(dtype, CUDA) for dtype in (torch.bfloat16, torch.float16, torch.float32)} == {torch.float32}
    assert logits_dtype(torch.float64, CUDA) == torch.float64
    assert all(logits_dtype(dtype, CPU) == dtype for dtype in (torch.bfloat16, torch.float32, torch.float64))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [(3, 2), (3,), ()])
def test_a_16_bit_head_gives_float32(tied, shape, monkeypatch):
    """A whole block, the last of each row, and one token: as verification, drafting and prefill ask."""
    monkeypatch.setattr(llama, "logits_dtype", lambda dtype, device: logits_dtype(dtype, CUDA))
    with torch.device("meta"):
        model = Transformer(replace(TINY, tie_embeddings=tied)).to(torch.bfloat16)
        logits = model.logits(torch.empty(*shape, TINY.dim, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32 and logits.shape == (*shape, TINY.vocab_size)
