"""Checkpoint folders like those of the hub: random tiny transformers models with a byte-level tokenizer."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

N_TOKENS = 257  # BOS and the bytes


def save_tokenizer(folder: Path) -> None:
    """One token per byte, behind a BOS."""
    alphabet = ["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))


def random_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Logits of order 1 to which attention, positions, biases and norms all matter."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
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


def save_folder(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> None:
    """What a download leaves: config.json, safetensors, tokenizer.json."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
