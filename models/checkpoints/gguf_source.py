"""A GGUF checkpoint, read through the `gguf` package, as Hugging Face config, names, layout and tokenizer."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFReader, ReaderTensor, dequantize, get_tensor_name_map
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer
from torch import Tensor

from common.errors import CheckpointError
from models.checkpoints.convert import Source, SourceTensor, source_parts
from models.checkpoints.manifest import CHAT_TEMPLATE, CONFIG, TOKENIZER_CONFIG
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.config import ModelConfig, read_config

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
Tensors = dict[str, SourceTensor]
# Of tokens; then of the text that is cut before byte pairs are merged.
CONTROL, USER_DEFINED = 3, 4
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default")


def open_gguf(path: Path, side_files: tuple[str, ...]) -> Source:
    """Open a GGUF file; among `side_files` a config.json, tokenizer or chat template takes the place of its metadata's.
    Raises CheckpointError for a damaged file or an unsupported architecture, tokenizer or rope scaling."""
    metadata, stored = read_gguf(path)
    architecture = str(metadata.get("general.architecture", "(none given)"))
    has_config = CONFIG in side_files
    described = path.with_name(CONFIG) if has_config else path
    hf_config = read_config(described) if has_config else _hf_config(path, metadata, stored, architecture)
    config = ModelConfig.from_hf(hf_config, where=str(described))
    tensors, names = {}, _hf_names(config)
    for name, tensor in stored.items():
        if architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.weight", name):
            tensor = replace(tensor, read=partial(_half_split, tensor.read, config.head_dim))
        # The factors are only the result of a rope scaling: without a config.json that has its settings, unknown.
        if name != ROPE_FACTORS or not has_config:
            tensors[names.get(name, name)] = tensor
    tokenizer = tokenizer_json(path, metadata) if set(TOKENIZER_FILES).isdisjoint(side_files) else None
    chat = None if {CHAT_TEMPLATE, TOKENIZER_CONFIG} & set(side_files) else metadata.get("tokenizer.chat_template")
    return Source((path,), tensors, hf_config, config, side_files, tokenizer, chat if isinstance(chat, str) else None)


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """A file's metadata, and its tensors, which stay on disk until they are read, as float32; shapes are row-major.

    Raises CheckpointError if the file is truncated or garbled; reading a tensor does, of a quantisation that the
    package cannot decode.
    """
    try:
        with np.errstate(over="ignore"):  # garbled sizes overflow before they are refused
            reader = GGUFReader(path)
            metadata = {name: entry.contents() for name, entry in reader.fields.items()}
            shapes = [tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors]
    except Exception as error:  # on a damaged header the package raises whatever comes first
        what, seen = "the GGUF file is truncated or garbled", f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(what, path, seen, "a whole GGUF file", "download the file again (download.py)") from None
    tensors = {
        tensor.name: SourceTensor(shape, torch.float32, path, partial(_dequantized, path, tensor, shape))
        for tensor, shape in zip(reader.tensors, shapes, strict=True)
    }
    return metadata, tensors


def _dequantized(path: Path, tensor: ReaderTensor, shape: tuple[int, ...]) -> Tensor:
    """In memory of its own."""
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        seen, fix = f"{tensor.name}: {tensor.tensor_type.name}", "use a Q4_1, Q8_0 or F16 file of the same model"
        required = "F32, F16, BF16, or a block quantisation that the gguf package decodes"
        raise CheckpointError("unsupported GGUF quantisation", path, seen, required, fix) from None
    return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(shape)


def _hf_config(path: Path, metadata: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    """The metadata as the keys of a Hugging Face config.json."""
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    stops = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    try:
        dim, n_head = own["embedding_length"], own["attention.head_count"]
        head_dim = own.get("attention.key_length", dim // n_head)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES.get(architecture, architecture)],
            "model_type": architecture,
            "hidden_act": "silu",
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": dim,
            "intermediate_size": own["feed_forward_length"],
            "num_hidden_layers": own["block_count"],
            "num_attention_heads": n_head,
            "num_key_value_heads": own.get("attention.head_count_kv", n_head),
            "head_dim": head_dim,
            "max_position_embeddings": own["context_length"],
            "rms_norm_eps": _short(own["attention.layer_norm_rms_epsilon"]),
            "rope_theta": _short(own.get("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(token for token in stops if token is not None)),
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
        raise CheckpointError(what, path, seen, "the sizes of the model", fix) from None
    return config


def _short(value: float) -> float:
    """The decimal that a stored float32 came from: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _hf_names(config: ModelConfig) -> dict[str, str]:
    """By GGUF name, the Hugging Face name of each tensor that a model of that size may have."""
    table = get_tensor_name_map(MODEL_ARCH.LLAMA, config.n_layer)
    parts = chain(*source_parts(replace(config, tie_embeddings=False, qkv_bias=True)).values())
    return {str(table.get_name(name, (".weight", ".bias"))): name for name, _ in parts}


def _half_split(read: Callable[[], Tensor], head_dim: int) -> Tensor:
    """llama.cpp stores Q and K of the llama architecture with rotary pairs side by side: (0, d/2, 1, ...)."""
    weight = read()
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def tokenizer_json(path: Path, metadata: dict[str, Any]) -> str:
    """The tokenizer of a GGUF as the text of a tokenizer.json. Raises CheckpointError naming a tokenizer that is not
    rebuilt here, or a vocabulary that is damaged."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        seen, required = f"tokenizer.ggml.model {model}, tokenizer.ggml.pre {pre}", f"gpt2 with one of {PRE_TOKENIZERS}"
        fix = "put tokenizer.json or tokenizer.model of the original model beside the GGUF"
        raise CheckpointError("this GGUF's tokenizer is not supported", path, seen, required, fix)
    try:
        return _build(metadata, pre).to_str()
    except Exception as error:  # the tokenizers package raises plain Exception on a bad vocabulary
        seen, required = f"{type(error).__name__}: {error}", "tokens, token types and merges that belong together"
        fix = "put tokenizer.json of the original model beside the GGUF, or download the GGUF again"
        raise CheckpointError("the GGUF's tokenizer is damaged", path, seen, required, fix) from None


def _build(metadata: dict[str, Any], pre: str) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens, {len(vocabulary)} different, {len(types)} types")
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    added = {kind: [t for t, k in zip(tokens, types, strict=True) if k == kind] for kind in (CONTROL, USER_DEFINED)}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in added[CONTROL]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added[USER_DEFINED]])
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        if bos_id not in range(len(tokens)):
            raise ValueError(f"BOS is token {bos_id} of {len(tokens)}")
        bos = tokens[bos_id]
        template = {"single": f"{bos} $A", "pair": f"{bos} $A {bos} $B"}
        tokenizer.post_processor = processors.TemplateProcessing(**template, special_tokens=[(bos, bos_id)])
    return tokenizer


def _pre_tokenizer(name: str) -> PreTokenizer:
    steps: list[PreTokenizer] = []
    if name in ("llama-bpe", "qwen2"):
        pattern = Regex(_SPLIT.format(digits="{1,3}" if name == "llama-bpe" else ""))
        steps = [pre_tokenizers.Split(pattern, behavior="isolated")]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
    if name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
