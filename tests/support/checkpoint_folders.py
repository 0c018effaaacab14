"""Tiny random models as checkpoint folders, in every format that is read."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from models.checkpoints.convert import source_parts
from models.checkpoints.hf_config import config_from_json
from models.config import ModelConfig

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS = "<s>"
VOCABULARY = [*ALPHABET, "th"]
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": len(VOCABULARY)}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
OPTIONS = {"rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": True, "eos_token_id": [1]}
HF_CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"]} | SHAPE | OPTIONS


def save_tokenizer(
    folder: Path,
    vocabulary: Sequence[str],
    merges: Sequence[tuple[str, str]] = (),
    adds_bos: bool = False,
    longest: int | None = None,
) -> None:
    """Write a byte-level tokenizer.json. longest: number of tokens to which it truncates, which we ignore."""
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(vocabulary)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS] if BOS in vocabulary else [])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    if longest is not None:
        tokenizer.enable_truncation(longest)
    tokenizer.save(str(folder / "tokenizer.json"))


def hf_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return random weights by Hugging Face name."""
    generator = torch.Generator().manual_seed(0)
    parts = [part for stacked in source_parts(config).values() for part in stacked]
    return {name: torch.randn(shape, generator=generator) for name, shape in parts}


def write_side_files(folder: Path, hf_config: dict[str, Any]) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2))
    save_tokenizer(folder, VOCABULARY)
    return config_from_json(folder / "config.json")


def write_weights(folder: Path, weights: dict[str, torch.Tensor], layout: str) -> list[Path]:
    """Write weight files. `layout`: safetensors or bin; "sharded" adds an index, "old" is the .bin before torch 1.6."""
    suffix, stem = (".safetensors", "model") if "safetensors" in layout else (".bin", "pytorch_model")
    names = list(weights)
    shards = [names[::2], names[1::2]] if "sharded" in layout else [names]
    files = []
    for number, shard in enumerate(shards, 1):
        infix = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
        files.append(folder / f"{stem}{infix}{suffix}")
        content = {name: weights[name] for name in shard}
        if suffix == ".safetensors":
            save_file(content, files[-1])
        else:
            torch.save(content, files[-1], _use_new_zipfile_serialization="old" not in layout)
    if len(shards) > 1:
        weight_map = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def write_source(
    folder: Path, hf_config: dict[str, Any] = HF_CONFIG, layout: str = "safetensors", **weights: torch.Tensor
) -> list[Path]:
    """Write a checkpoint folder with random weights, except for `weights`; return its weight files."""
    return write_weights(folder, hf_weights(write_side_files(folder, hf_config)) | weights, layout)
