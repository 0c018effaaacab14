"""A GGUF checkpoint as Hugging Face config, names, layout and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from models.checkpoints.convert import Source
from models.checkpoints.gguf_reader import GGUFFile, read_gguf
from models.checkpoints.gguf_tokenizer import tokenizer_json
from models.checkpoints.manifest import CONFIG, own_side_files
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.config import ModelConfig, read_config

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
    architecture = str(file.metadata.get("general.architecture", "(none given)"))
    _require_supported(file, architecture, has_config=CONFIG in side_files)
    described = path.with_name(CONFIG) if CONFIG in side_files else path
    hf_config = _hf_config(file, architecture) if described == path else read_config(described)
    config = ModelConfig.from_hf(hf_config, where=str(described))
    tensors = {}
    for name, tensor in file.tensors.items():
        if architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.weight", name):
            tensor = replace(tensor, read=partial(_half_split, tensor.read, config.head_dim))
        if name != ROPE_FACTORS:
            tensors[_hf_name(name)] = tensor
    beside = not set(TOKENIZER_FILES).isdisjoint(side_files)
    tokenizer = None if beside else tokenizer_json(path, file.metadata)
    return Source((path,), tensors, hf_config, config, side_files, tokenizer)


def _require_supported(file: GGUFFile, architecture: str, has_config: bool) -> None:
    experts = file.metadata.get(f"{architecture}.expert_count", 0)
    parts = file.metadata.get("split.count", 1)
    dense, use_dense = f"a dense model of {' or '.join(ARCHITECTURES)}", "use a GGUF of a Llama, Mistral or Qwen2 model"
    merge = "merge the parts with llama.cpp's gguf-split --merge"
    # It holds only the result of its rope scaling, not the settings.
    unscaled, copy = "a config.json with rope_scaling beside it", "copy config.json of the original model there"
    for is_refused, seen, required, fix in (
        (architecture not in ARCHITECTURES, f"architecture {architecture}", dense, use_dense),
        (experts, f"{architecture} with {experts} experts", dense, use_dense),
        (parts > 1, f"one of {parts} parts", "one file", merge),
        (ROPE_FACTORS in file.tensors and not has_config, ROPE_FACTORS, unscaled, copy),
    ):
        if is_refused:
            raise CheckpointError("this GGUF is not supported", file.path, seen, required, fix)


def _hf_config(file: GGUFFile, architecture: str) -> dict[str, Any]:
    """The metadata as the keys of a Hugging Face config.json."""
    metadata, prefix = file.metadata, f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    try:
        dim, n_head = own["embedding_length"], own["attention.head_count"]
        head_dim = own.get("attention.key_length", dim // n_head)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "hidden_act": "silu",
            "vocab_size": file.tensors["token_embd.weight"].shape[0],
            "hidden_size": dim,
            "intermediate_size": own["feed_forward_length"],
            "num_hidden_layers": own["block_count"],
            "num_attention_heads": n_head,
            "num_key_value_heads": own.get("attention.head_count_kv", n_head),
            "head_dim": head_dim,
            "max_position_embeddings": own["context_length"],
            "rms_norm_eps": _short(own["attention.layer_norm_rms_epsilon"]),
            "rope_theta": _short(own.get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": _stop_tokens(metadata),
        }
        if (scaling := own.get("rope.scaling.type", "none")) != "none":
            config["rope_scaling"] = {"rope_type": scaling, "factor": _short(own.get("rope.scaling.factor", 1.0))}
        if "attention.sliding_window" in own:
            config["sliding_window"] = own["attention.sliding_window"]
        if (rotated := own.get("rope.dimension_count", head_dim)) != head_dim:
            raise ValueError(f"rope.dimension_count {rotated} is not head_dim {head_dim}")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        what, seen = "the GGUF metadata does not describe a supported model", f"{type(error).__name__}: {error}"
        fix = "put the original model's config.json beside the GGUF, or use another file"
        raise CheckpointError(what, file.path, seen, "the sizes of the model", fix) from None
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


def _half_split(read: Callable[[], Tensor], head_dim: int) -> Tensor:
    """llama.cpp stores Q and K of the llama architecture with rotary pairs side by side: (0, d/2, 1, ...)."""
    weight = read()
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)
