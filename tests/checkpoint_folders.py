"""Tiny random models as checkpoint folders, in every format that is read, each with a manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from convert_hf_checkpoint import convert
from models.checkpoints.convert import source_parts
from models.checkpoints.gguf_source import NAMES
from models.checkpoints.manifest import describe, update_manifest
from models.config import ModelConfig

VOCABULARY = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
MERGE = ("t", "h")
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(VOCABULARY),
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [1],
}
OTHER = HF_CONFIG | {"hidden_size": 24, "num_hidden_layers": 3}


def make_folders(folder: Path, hf_config: dict[str, Any]) -> None:
    """One folder per format, and one with the model.pth of a conversion; each with the manifest of a download."""
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig.from_hf(hf_config)
    parts = [part for stacked in source_parts(config).values() for part in stacked]
    weights = {name: torch.randn(shape, generator=generator) for name, shape in parts}
    merges = [MERGE] if hf_config is HF_CONFIG else []
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(VOCABULARY)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name in ("safetensors", "sharded", "bin", "gguf", "converted"):
        (folder / name).mkdir(parents=True)
        if name not in ("gguf", "converted"):
            (folder / name / "config.json").write_text(json.dumps(hf_config, indent=2))
            tokenizer.save(str(folder / name / "tokenizer.json"))
    save_file(weights, folder / "safetensors" / "model.safetensors")
    shards = {f"model-0000{n}-of-00002.safetensors": list(weights)[n - 1 :: 2] for n in (1, 2)}
    for shard, names in shards.items():
        save_file({name: weights[name] for name in names}, folder / "sharded" / shard)
    index = {"weight_map": {name: shard for shard, names in shards.items() for name in names}}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    torch.save(weights, folder / "bin" / "pytorch_model.bin")
    write_gguf(folder / "gguf" / "tiny.gguf", hf_config, weights)
    for path in sorted(folder.iterdir()):
        update_manifest(path, describe(path, sorted(file.name for file in path.iterdir())))
    convert(folder / "safetensors", folder / "converted")


def write_gguf(path: Path, hf_config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(hf_config["max_position_embeddings"])
    writer.add_embedding_length(hf_config["hidden_size"])
    writer.add_block_count(hf_config["num_hidden_layers"])
    writer.add_feed_forward_length(hf_config["intermediate_size"])
    writer.add_head_count(hf_config["num_attention_heads"])
    writer.add_head_count_kv(hf_config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf_config["rms_norm_eps"])
    writer.add_rope_freq_base(hf_config["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([1] * len(VOCABULARY))
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(hf_config["eos_token_id"][0])
    ours = {theirs: name for name, theirs in NAMES.items()}
    for name, tensor in weights.items():
        stem = name.removesuffix(".weight")
        _, layer, rest = stem.partition("model.layers.")
        number, _, inner = rest.partition(".")
        writer.add_tensor(f"blk.{number}.{ours[inner]}.weight" if layer else f"{ours[stem]}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
