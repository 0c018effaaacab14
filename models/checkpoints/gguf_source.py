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
from gguf import MODEL_ARCH, GGUFEndian, GGUFReader, GGUFValueType, ReaderTensor, dequantize, get_tensor_name_map
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer
from torch import Tensor

from common.errors import refuse_checkpoint
from models.checkpoints.convert import Source, SourceTensor, source_parts
from models.checkpoints.hf_config import config_from_hf, read_config
from models.checkpoints.manifest import CHAT_TEMPLATE, CONFIG, TOKENIZER_CONFIG
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.config import ModelConfig
from models.rope import inverse_frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FACTORS = "rope_freqs.weight"
# Metadata keys without effect on the logits, with any value or with one value. A key that is neither read nor listed
# is refused.
NO_EFFECT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
NEUTRAL = {"attention.causal": True, "attention.sliding_window": 0, "rope.scaling.attn_factor": 1.0}
NEUTRAL |= {"expert_count": 0, "expert_used_count": 0}
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Tensors = dict[str, SourceTensor]
CONTROL, USER_DEFINED = 3, 4  # types of tokens
# Cuts a text into the parts within which byte pairs are merged.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OTHER_CONFIG = f"put the {CONFIG} of this very model next to the GGUF"
OTHER_TOKENIZER = "put tokenizer.json or tokenizer.model of the original model next to the GGUF"
OTHER_FILE = "use another GGUF of a supported family (docs/checkpoints.md), or the model's safetensors"
refuse_gguf = partial(refuse_checkpoint, fix=OTHER_FILE)
PRE_TOKENIZERS = ("smollm", "llama-bpe", "qwen2", "gpt-2")


def open_gguf(path: Path, side_files: tuple[str, ...]) -> Source:
    """Open a GGUF file; a config.json, tokenizer or chat template in `side_files` replaces its metadata's. Raises
    CheckpointError for a damaged file or an unsupported architecture, tokenizer or rope scaling."""
    metadata, stored = read_gguf(path)
    architecture = str(metadata.get("general.architecture", "(none given)"))
    if architecture not in ARCHITECTURES:
        refuse_gguf(f"{path}: general.architecture", architecture, " or ".join(ARCHITECTURES))
    hf_config, has_config = _hf_config(path, metadata, stored, architecture), CONFIG in side_files
    config = config_from_hf(hf_config, where=str(path))
    if has_config:
        config_path, described = path.with_name(CONFIG), config
        hf_config = read_config(config_path)
        config = config_from_hf(hf_config, where=str(config_path))
        _check_config(config_path, config, described, stored.get(ROPE_FACTORS))
    tensors, names = {}, _hf_names(config, architecture)
    for name, tensor in stored.items():
        if architecture == "llama" and re.fullmatch(r"blk\.\d+\.attn_[qk]\.weight", name):
            tensor = replace(tensor, read=partial(_half_split, tensor.read, config.head_dim))
        # The factors are the result of a rope scaling, whose settings only a config.json has.
        if name != ROPE_FACTORS or not has_config:
            tensors[names.get(name, name)] = tensor
    tokenizer = tokenizer_json(path, metadata) if set(TOKENIZER_FILES).isdisjoint(side_files) else None
    chat = None if {CHAT_TEMPLATE, TOKENIZER_CONFIG} & set(side_files) else metadata.get("tokenizer.chat_template")
    return Source((path,), tensors, hf_config, config, side_files, tokenizer, chat if isinstance(chat, str) else None)


class _Reader(GGUFReader):
    """Reads a file as its base does, but nothing beyond the file's end."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """Return numbers at a byte of the file, in a plain array: the base makes memmaps, which takes far longer."""
        order = override_order or self.byte_order
        return np.frombuffer(self.data, np.dtype(dtype).newbyteorder(order), int(count), int(offset))

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY and (length := self._get(orig_offs + 4, np.uint64)[0]) > len(self.data):
            raise ValueError(f"an array of {length} elements in {len(self.data)} bytes")
        return super()._get_field_parts(orig_offs, raw_type)


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Return a file's metadata, and its tensors, which stay on disk until they are read, as float32; shapes are
    row-major. Raises CheckpointError if the file is truncated, garbled, big-endian, or a part of a split file. Reading
    a tensor raises it for a quantisation that the package cannot decode."""
    try:
        with np.errstate(over="ignore"):  # garbled sizes overflow before they are refused
            reader = _Reader(path)
            metadata = {name: entry.contents() for name, entry in reader.fields.items()}
            shapes = [tuple(map(int, reversed(tensor.shape))) for tensor in reader.tensors]
    except Exception as error:  # on a damaged header the package raises whatever comes first
        what, seen = "the GGUF file is truncated or garbled", f"{type(error).__name__}: {str(error)[:200]}"
        refuse_gguf(path, seen, "a whole GGUF file", what, fix="download the file again (download.py)")
    if reader.endianess == GGUFEndian.BIG:
        refuse_gguf(path, "big-endian numbers", "a little-endian GGUF file")
    if (n_files := metadata.get("split.count", 1)) not in (0, 1):
        fix = "join the files with llama.cpp (llama-gguf-split --merge), and keep only the result in this folder"
        refuse_gguf(path, f"split.count {n_files}: one of {n_files} files", "the whole model in one file", fix=fix)
    tensors = {
        tensor.name: SourceTensor(shape, torch.float32, path, partial(_dequantized, path, tensor, shape), kind)
        for tensor, shape in zip(reader.tensors, shapes, strict=True)
        for kind in [DTYPE_NAMES.get(tensor.tensor_type.name, tensor.tensor_type.name)]
    }
    return metadata, tensors


def _dequantized(path: Path, tensor: ReaderTensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor's values in memory that the file does not back."""
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        required = "in F32, F16, BF16, or a block quantisation that the gguf package decodes, such as Q4_1"
        refuse_gguf(f"{path}: {tensor.name}", tensor.tensor_type.name, required)
    return torch.from_numpy(np.array(values, dtype=np.float32)).reshape(shape)


def _check_config(path: Path, config: ModelConfig, described: ModelConfig, rope_factors: SourceTensor | None) -> None:
    """Raise CheckpointError if the config.json next to a GGUF contradicts `described`, the config of its metadata. The
    metadata lacks windows, ends of text and the scaling that gave the divisors of frequencies, `rope_freqs.weight`."""
    names = ["vocab_size", "n_layer", "dim", "n_head", "n_kv_head", "head_dim", "ffn_dim", "norm_eps", "rope_theta"]
    names += ["rotary_dim", "unrotated_layers", "qk_norm", "n_expert"]
    names += ["rope_scaling"] if rope_factors is None else []
    for name in names:
        seen, required = getattr(config, name), getattr(described, name)
        if seen != required:
            refuse_gguf(path, f"{name} {seen}", f"{required}, as in the GGUF", fix=f"{OTHER_CONFIG}, or none")
    if rope_factors is None:
        return
    expected = inverse_frequencies(replace(config, rope_scaling=None)) / inverse_frequencies(config)
    if rope_factors.shape != expected.shape or not torch.allclose(rope_factors.read(), expected, rtol=1e-3):
        required = f"the factors of rope_scaling {config.rope_scaling} ({CONFIG})"
        refuse_gguf(rope_factors.file, f"{ROPE_FACTORS} {rope_factors.shape}", required, fix=OTHER_CONFIG)


def _hf_config(path: Path, metadata: dict[str, Any], tensors: Tensors, architecture: str) -> dict[str, Any]:
    """Return the metadata as the keys of a Hugging Face config.json, read as llama.cpp reads them. Raises
    CheckpointError naming a key that changes the result and is not supported."""
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    stops = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    try:
        dim, n_head = keys.pop("embedding_length"), keys.pop("attention.head_count")
        head_dim = keys.pop("attention.key_length", dim // n_head)
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "hidden_act": "silu",
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "hidden_size": dim,
            "intermediate_size": keys.pop("feed_forward_length"),
            "num_hidden_layers": keys.pop("block_count"),
            "num_attention_heads": n_head,
            "num_key_value_heads": keys.pop("attention.head_count_kv", n_head),
            "head_dim": head_dim,
            "max_position_embeddings": keys.pop("context_length"),
            "rms_norm_eps": _short(keys.pop("attention.layer_norm_rms_epsilon")),
            "rope_theta": _short(keys.pop("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": list(dict.fromkeys(token for token in stops if token is not None)),
        }
        scaling, older_factor = keys.pop("rope.scaling.type", "linear"), keys.pop("rope.scale_linear", 0.0)
        factor = _short(keys.pop("rope.scaling.factor", older_factor)) or 1.0
        if scaling not in ("none", "linear", "yarn"):
            raise ValueError(f"{prefix}rope.scaling.type {scaling} is not supported")
        if scaling != "none" and factor != 1.0:
            config["rope_scaling"] = {"rope_type": scaling, "factor": factor}
        if scaling == "yarn" and factor != 1.0:
            config["original_max_position_embeddings"] = keys.pop("rope.scaling.original_context_length")
            for name in ("beta_fast", "beta_slow"):
                if (value := keys.pop(f"rope.scaling.yarn_{name}", None)) is not None:
                    config["rope_scaling"][name] = _short(value)
        for key in ("rope.dimension_count", "attention.value_length"):
            if (size := keys.pop(key, head_dim)) != head_dim:
                raise ValueError(f"{key} {size} is not head_dim {head_dim}")
        for key in keys.keys() - NO_EFFECT:
            if keys[key] != NEUTRAL.get(key):
                raise ValueError(f"{prefix}{key} {keys[key]} is not supported")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        refuse_gguf(path, f"{type(error).__name__}: {error}", "metadata of a supported model")
    return config


def _short(value: float) -> float:
    """Return the decimal that a stored float32 came from: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _hf_names(config: ModelConfig, architecture: str) -> dict[str, str]:
    """Map GGUF names to Hugging Face names, for each tensor that a model of that size may have."""
    table = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.n_layer)
    parts = chain(*source_parts(replace(config, tie_embeddings=False, qkv_bias=True)).values())
    return {str(table.get_name(name, (".weight", ".bias"))): name for name, _ in parts}


def _half_split(read: Callable[[], Tensor], head_dim: int) -> Tensor:
    """Read Q or K of llama.cpp's llama architecture, whose rotary pairs lie side by side: (0, d/2, 1, ...)."""
    weight = read()
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).reshape(weight.shape)


def tokenizer_json(path: Path, metadata: dict[str, Any]) -> str:
    """Return a GGUF's tokenizer as the text of a tokenizer.json. Raises CheckpointError for a tokenizer that is not
    rebuilt here, or a damaged vocabulary."""
    model, pre, adds_eos = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "add_eos_token"))
    if model != "gpt2" or pre not in PRE_TOKENIZERS or adds_eos:
        seen = f"tokenizer.ggml.model {model}, tokenizer.ggml.pre {pre}, tokenizer.ggml.add_eos_token {adds_eos}"
        required = f"gpt2 with one of {PRE_TOKENIZERS}, and no end token after every text"
        refuse_gguf(path, seen, required, "this GGUF's tokenizer is not supported", fix=OTHER_TOKENIZER)
    try:
        return _build(metadata, pre).to_str()
    except Exception as error:  # the tokenizers package raises plain Exception on a bad vocabulary
        seen, required = f"{type(error).__name__}: {error}", "tokens, token types and merges that belong together"
        refuse_gguf(path, seen, required, "the GGUF's tokenizer is damaged", fix=OTHER_TOKENIZER)


def _build(metadata: dict[str, Any], pre: str) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if strange := [merge for merge in merges if "".join(merge) not in vocabulary]:  # the package would panic
        raise ValueError(f"the merge {strange[0]} gives no token")
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
    pattern = Regex(_SPLIT.format(digits="{1,3}" if name == "llama-bpe" else ""))
    by_name = {"gpt-2": [], "smollm": [pre_tokenizers.Digits(individual_digits=True)]}
    steps = by_name.get(name, [pre_tokenizers.Split(pattern, behavior="isolated")])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in by_name)
    return pre_tokenizers.Sequence([*steps, byte_level])
