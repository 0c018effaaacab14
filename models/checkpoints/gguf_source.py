"""A GGUF checkpoint as Hugging Face config, names, layout and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError
from models.checkpoints.gguf_reader import GGUFFile, GGUFTensor, read_gguf
from models.checkpoints.gguf_tokenizer import tokenizer_json
from models.checkpoints.side_files import CONFIG, own_side_files
from models.checkpoints.source import Source, SourceTensor, read_hf_config
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.config import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path, side_files_are_theirs: bool = False) -> Source:
    """Open a GGUF file. A config.json or a tokenizer beside it takes the place of the one in its metadata.

    Unless a conversion generated it: such a one is made again. Raises CheckpointError for a damaged file or an
    unsupported architecture, tokenizer or rope scaling.
    """
    side_files = own_side_files(path.parent, [path], side_files_are_theirs)
    file = read_gguf(path)
    architecture = _architecture(file)
    if CONFIG in side_files:
        hf_config, config = read_hf_config(path.parent)
    elif ROPE_FACTORS in file.tensors:
        raise CheckpointError(
            "the GGUF holds only the result of its rope scaling, not the settings",
            where=str(path),
            seen=ROPE_FACTORS,
            required="a config.json with rope_scaling beside the GGUF",
            fix="copy config.json of the original model into this folder",
        )
    else:
        hf_config = _hf_config(file, architecture)
        config = ModelConfig.from_hf(hf_config, where=str(path))
    tensors = {}
    for name, tensor in file.tensors.items():
        if name != ROPE_FACTORS:
            read = _half_split(tensor, config) if architecture == "llama" else tensor.read
            tensors[_hf_name(name)] = SourceTensor(tensor.shape, torch.float32, path, read)
    beside = not set(TOKENIZER_FILES).isdisjoint(side_files)
    tokenizer = None if beside else tokenizer_json(path, file.metadata)
    return Source((path,), tensors, hf_config, config, side_files, tokenizer)


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture", "(none given)")
    experts = file.metadata.get(f"{architecture}.expert_count", 0)
    if architecture not in ARCHITECTURES or experts:
        raise CheckpointError(
            "unsupported GGUF architecture",
            where=str(file.path),
            seen=f"{architecture} with {experts} experts" if experts else architecture,
            required=f"a dense model of {' or '.join(ARCHITECTURES)}",
            fix="use a GGUF of a Llama, Mistral or Qwen2 model",
        )
    if file.metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            "the GGUF is one part of a split file",
            where=str(file.path),
            seen=f"{file.metadata['split.count']} parts",
            required="one file",
            fix="merge the parts with llama.cpp's gguf-split --merge",
        )
    return str(architecture)


def _hf_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The metadata as the keys of a Hugging Face config.json."""
    metadata, prefix = file.metadata, f"{architecture}."
    try:
        dim, n_head = metadata[f"{prefix}embedding_length"], metadata[f"{prefix}attention.head_count"]
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "hidden_act": "silu",
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "hidden_size": dim,
            "intermediate_size": metadata[f"{prefix}feed_forward_length"],
            "num_hidden_layers": metadata[f"{prefix}block_count"],
            "num_attention_heads": n_head,
            "num_key_value_heads": metadata.get(f"{prefix}attention.head_count_kv", n_head),
            "head_dim": metadata.get(f"{prefix}attention.key_length", dim // n_head),
            "max_position_embeddings": metadata[f"{prefix}context_length"],
            "rms_norm_eps": _short(metadata[f"{prefix}attention.layer_norm_rms_epsilon"]),
            "rope_theta": _short(metadata.get(f"{prefix}rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": _stop_tokens(metadata),
        }
        rotated = metadata.get(f"{prefix}rope.dimension_count", config["head_dim"])
        scaling = metadata.get(f"{prefix}rope.scaling.type", "none")
        if scaling != "none":
            factor = _short(metadata.get(f"{prefix}rope.scaling.factor", 1.0))
            config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}", "the sizes of the model") from None
    if rotated != config["head_dim"]:
        raise _damaged(file, f"rope.dimension_count {rotated}", f"head_dim {config['head_dim']}")
    if f"{prefix}attention.sliding_window" in metadata:
        config["sliding_window"] = metadata[f"{prefix}attention.sliding_window"]
    return config


def _stop_tokens(metadata: dict[str, Any]) -> list[int]:
    found = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in found if token is not None))


def _short(value: float) -> float:
    """The decimal that a stored float32 came from: 1e-05, not 9.999999747378752e-06."""
    if not isinstance(value, float):
        raise TypeError(f"{value!r} is not stored as a float")
    return float(f"{value:.7g}")


def _hf_name(name: str) -> str:
    """The Hugging Face name; an unknown name is kept, for the caller to refuse."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in NAMES:
        return f"model.layers.{layer[1]}.{NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


def _half_split(tensor: GGUFTensor, config: ModelConfig) -> Callable[[], Tensor]:
    """llama.cpp stores Q and K of the llama architecture with rotary pairs side by side: (0, d/2, 1, ...)."""
    if not re.fullmatch(r"blk\.\d+\.attn_[qk]\.weight", tensor.name):
        return tensor.read
    return partial(_read_half_split, tensor, config.head_dim)


def _read_half_split(tensor: GGUFTensor, head_dim: int) -> Tensor:
    n_in = tensor.shape[-1]
    return tensor.read().view(-1, head_dim // 2, 2, n_in).transpose(1, 2).reshape(-1, n_in)


def _damaged(file: GGUFFile, seen: str, required: str) -> CheckpointError:
    return CheckpointError(
        "the GGUF metadata does not describe a supported model",
        where=str(file.path),
        seen=seen,
        required=required,
        fix="put the original model's config.json beside the GGUF, or use another file",
    )
