"""Logits keep float32 where a GPU's matrix product can: in 16 bits near ones would tie. Without a GPU."""

from dataclasses import replace

import pytest
import torch
from tiny import TINY

from models import llama
from models.llama import Transformer, logits_dtype

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [(3, 2), (3,), ()])
def test_a_16_bit_head_gives_float32(tied, shape, monkeypatch):
    """Logits of a block, of the last token of each row, and of a single token, where a GPU is named."""
    monkeypatch.setattr(llama, "logits_dtype", lambda dtype, device: logits_dtype(dtype, CUDA))
    with torch.device("meta"):
        model = Transformer(replace(TINY, tie_embeddings=tied)).to(torch.bfloat16)
        logits = model.logits(torch.empty(*shape, TINY.dim, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32 and logits.shape == (*shape, TINY.vocab_size)
    assert logits_dtype(torch.float64, CUDA) == torch.float64 and logits_dtype(torch.bfloat16, CPU) == torch.bfloat16
