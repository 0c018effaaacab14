"""Checkpoint folders like those of the hub: random tiny transformers models, a token a byte behind a BOS."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from convert_hf_checkpoint import convert
from tests.support.checkpoint_folders import ALPHABET, BOS, save_tokenizer

TOKENS = [BOS, *ALPHABET]
N_TOKENS = len(TOKENS)
SHAPE = {"vocab_size": N_TOKENS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LLAMA3_CORNERS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def rope(theta: float, rope_type: str = "default", **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, "rope_type": rope_type, **settings}}


def llama3_rope(factor: float) -> dict[str, Any]:
    """At head_dim 16 and theta 5e5, wavelength 6 is kept, 32 is on the ramp, 167 and beyond are slowed down."""
    return rope(500000.0, "llama3", factor=factor, **LLAMA3_CORNERS)


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model with logits of order 1, to which attention, positions, biases and norms all matter."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.3 * noise
        elif name.endswith("bias"):
            parameter.data = 0.5 * noise
        else:
            parameter.data = noise / math.sqrt(parameter.shape[-1])
    model.tie_weights()
    return model.eval().requires_grad_(False)


def save_folder(model: PreTrainedModel, folder: Path) -> None:
    """Save a folder like a download: config.json, safetensors, tokenizer.json."""
    model.save_pretrained(folder)
    save_tokenizer(folder, TOKENS, adds_bos=True)


def converted_llama(folder: Path, **changes: Any) -> Path:
    """Save a random Llama of SHAPE with changes of its config, and convert it; return the folder."""
    save_folder(random_model(LlamaConfig(**SHAPE | {"bos_token_id": 0} | changes)), folder)
    convert(folder, folder)
    return folder
