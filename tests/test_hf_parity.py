"""The Transformer against Hugging Face's own models, family by family."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_tiny import N_TOKENS, SHAPE, llama3_rope, random_model, rope, save_folder
from torch import Tensor
from transformers import (
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from convert_hf_checkpoint import convert
from engine import ModelRunner
from kv_cache import FullKVCache
from models import Transformer, load_model

TOLERANCE = 1e-5
LENGTHS = [27, 48]  # of the two rows
PREFILLED = [7, 28]  # 20 tokens of each row are left to decode
MHA = {"num_key_value_heads": 4}
MOE = {"head_dim": 16, "moe_intermediate_size": 24}
NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """A transformers config and what sets the family apart."""

    config: type[PreTrainedConfig]
    settings: dict[str, Any]
    max_shard_size: str = "1GB"


FAMILIES = {
    "llama-2": Family(LlamaConfig, MHA | rope(10000.0)),
    "llama-3": Family(LlamaConfig, rope(500000.0) | {"rms_norm_eps": 1e-5}, "40KB"),
    "llama-3.1": Family(LlamaConfig, llama3_rope(8.0)),
    "llama-3.2": Family(LlamaConfig, llama3_rope(32.0) | {"tie_word_embeddings": True}),
    "llama-2-7b-32k": Family(LlamaConfig, MHA | rope(10000.0, "linear", factor=8.0)),
    "llama-68m": Family(LlamaConfig, MHA | rope(10000.0) | {"hidden_size": 32, "rms_norm_eps": 0.1}),
    "smollm2": Family(
        LlamaConfig,
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
        | rope(100000.0),
    ),
    "mistral-0.1": Family(MistralConfig, {"sliding_window": 11} | rope(10000.0)),
    "mistral-0.3": Family(MistralConfig, {"sliding_window": None, "head_dim": 24} | rope(1000000.0)),
    "qwen2.5": Family(Qwen2Config, rope(1000000.0)),
    "llama with biases": Family(LlamaConfig, MHA | rope(10000.0) | {"attention_bias": True, "mlp_bias": True}, "40KB"),
    "qwen3": Family(Qwen3Config, {"head_dim": 22, "num_attention_heads": 10} | rope(1000000.0), "40KB"),
    "qwen3 tied, extended": Family(
        Qwen3Config,
        {"head_dim": 32, "tie_word_embeddings": True, "num_attention_heads": 7, "num_key_value_heads": 1}
        | {"attention_bias": True}
        | rope(1000000.0, "yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "smollm3": Family(
        SmolLM3Config, NO_SPECIAL_TOKENS | {"no_rope_layers": [0, 1], "tie_word_embeddings": False} | rope(1000000.0)
    ),
    "smollm3, each second": Family(SmolLM3Config, NO_SPECIAL_TOKENS | {"no_rope_layer_interval": 2} | rope(1000000.0)),
    "qwen3-moe": Family(
        Qwen3MoeConfig,
        MOE | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True} | rope(1000000.0),
    ),
    "qwen3-moe, one expert each": Family(
        Qwen3MoeConfig, MOE | {"num_experts": 5, "num_experts_per_tok": 1, "attention_bias": True} | rope(1000000.0)
    ),
    "phi-3": Family(Phi3Config, NO_SPECIAL_TOKENS | {"sliding_window": 11} | rope(10000.0), "40KB"),
    "phi-4": Family(
        Phi3Config,
        NO_SPECIAL_TOKENS
        | {"hidden_size": 80, "original_max_position_embeddings": 16}  # 10 of 20 elements of a head are rotated
        | rope(
            10000.0,
            "longrope",
            partial_rotary_factor=0.5,
            short_factor=[1.0] * 5,
            long_factor=[1.0, 1.5, 2.0, 4.0, 7.0],
        ),
    ),
    "yarn to the letter": Family(
        LlamaConfig,
        rope(5000.0, "yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0)
        | {"max_position_embeddings": 128},
    ),
    "yarn of deepseek": Family(
        LlamaConfig, rope(5000.0, "yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.3, truncate=False)
    ),
    "yarn with a factor": Family(LlamaConfig, rope(5000.0, "yarn", factor=4.0, attention_factor=1.7)),
    "dynamic": Family(LlamaConfig, rope(10000.0, "dynamic", factor=4.0)),
}


@dataclass(frozen=True)
class Case:
    """A family's model by transformers, converted: the folder, two rows of tokens, the logits `[T, V]` of each."""

    family: Family
    folder: Path
    rows: list[Tensor]
    logits: list[Tensor]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = random_model(family.config(**(SHAPE | family.settings)))
    save_folder(model, folder, family.max_shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (family.max_shard_size != "1GB")
    convert(folder, folder)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(N_TOKENS, (length,), generator=generator) for length in LENGTHS]
    return Case(family, folder, rows, [reference_logits(model, row) for row in rows])


def reference_logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    logits = model(row[None]).logits[0]
    assert 0.3 < float(logits.std()) < 3, "the tolerance is absolute: it means something for logits of order 1"
    return logits


def all_logits(model: Transformer, row: Tensor) -> Tensor:
    """One forward over a whole row in an empty cache."""
    cache = FullKVCache(model.config, 1, len(row))
    return model(row[None], torch.arange(len(row))[None], cache)[0]


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
        assert_close(all_logits(model, row), theirs)
        assert_close(runner.prefill_row(i, row.tolist()).logits, theirs[-1])
        assert_close(runner.prefill_row(i, row[:length].tolist()).logits, theirs[length - 1])
    starts = torch.tensor(PREFILLED)
    for done in range(0, LENGTHS[0] - PREFILLED[0], block):
        positions = starts[:, None] + done + torch.arange(block)
        tokens = torch.stack([row[at] for row, at in zip(case.rows, positions, strict=True)])
        theirs = torch.stack([logits[at] for logits, at in zip(case.logits, positions, strict=True)])
        assert_close(runner.step(tokens, positions), theirs)
