"""The Transformer against the models of transformers, family by family."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hf_tiny import N_TOKENS, SHAPE, llama3_rope, random_model, rope, save_folder
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from convert_hf_checkpoint import convert
from engine import ModelRunner
from kv_cache import FullKVCache
from models import load_model

TOLERANCE = 1e-5
LENGTHS = [27, 48]  # of the two rows
PREFILLED = [7, 28]  # 20 tokens of each row are left to decode
MHA = {"num_key_value_heads": 4}


FAMILIES: dict[str, PreTrainedConfig] = {
    "llama-2": LlamaConfig(**SHAPE | MHA | rope(10000.0)),
    "llama-3": LlamaConfig(**SHAPE | rope(500000.0) | {"rms_norm_eps": 1e-5}),
    "llama-3.1": LlamaConfig(**SHAPE | llama3_rope(8.0)),
    "llama-3.2": LlamaConfig(**SHAPE | llama3_rope(32.0) | {"tie_word_embeddings": True}),
    "llama-2-7b-32k": LlamaConfig(**SHAPE | MHA | rope(10000.0, "linear", factor=8.0)),
    "llama-68m": LlamaConfig(**SHAPE | MHA | rope(10000.0) | {"hidden_size": 32, "rms_norm_eps": 0.1}),
    "smollm2": LlamaConfig(
        **SHAPE | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3} | rope(100000.0)
    ),
    "mistral-0.1": MistralConfig(**SHAPE | {"sliding_window": 11} | rope(10000.0)),
    "mistral-0.3": MistralConfig(**SHAPE | {"sliding_window": None, "head_dim": 24} | rope(1000000.0)),
    "qwen2.5": Qwen2Config(**SHAPE | rope(1000000.0)),
}


@dataclass(frozen=True)
class Case:
    """A family's model by transformers, converted: the folder, two rows of tokens, the logits `[T, V]` of each."""

    folder: Path
    rows: list[Tensor]
    logits: list[Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(FAMILIES[request.param])
    save_folder(model, folder)
    convert(folder, folder)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(N_TOKENS, (length,), generator=generator) for length in LENGTHS]
    logits = [model(row[None]).logits[0] for row in rows]
    assert all(0.3 < float(x.std()) < 3 for x in logits), "the tolerance is absolute, for logits of order 1"
    return Case(folder, rows, logits)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


# Prefilled whole, or in chunks: 18 is beyond a packed block. 20 tokens that are left divide into blocks.
@pytest.mark.parametrize("prepack, chunk, block", [(True, 48, 1), (False, 18, 4), (True, 5, 20)])
def test_prefill_and_cached_decode_of_two_rows_of_different_length(
    case: Case, prepack: bool, chunk: int, block: int
) -> None:
    model = load_model(case.folder, prepack=prepack)
    runner = ModelRunner(model, FullKVCache(model.config, len(case.rows), max(LENGTHS)), chunk)
    for i, (row, theirs, length) in enumerate(zip(case.rows, case.logits, PREFILLED, strict=True)):
        cache = FullKVCache(model.config, 1, len(row))
        assert_close(model(row[None], torch.arange(len(row))[None], cache)[0], theirs)
        assert_close(runner.prefill_row(i, row.tolist()).logits, theirs[-1])
        assert_close(runner.prefill_row(i, row[:length].tolist()).logits, theirs[length - 1])
    starts = torch.tensor(PREFILLED)
    for done in range(0, LENGTHS[0] - PREFILLED[0], block):
        positions = starts[:, None] + done + torch.arange(block)
        tokens = torch.stack([row[at] for row, at in zip(case.rows, positions, strict=True)])
        theirs = torch.stack([logits[at] for logits, at in zip(case.logits, positions, strict=True)])
        assert_close(runner.step(tokens, positions), theirs)
