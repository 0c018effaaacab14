"""Checkpoints that were published quantised: their weights, also as transformers reads them, and what is refused.

Random codes are packed as each format's tools do, next to the weights that they stand for.
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, LlamaConfig, Phi3Config

from common.errors import CheckpointError, ConfigError
from convert_hf_checkpoint import convert
from kv_cache import FullKVCache
from models.checkpoints.loading import load_model, read_checkpoint
from models.checkpoints.manifest import read_manifest
from models.checkpoints.model_source import find_model
from tests.support.checkpoint_folders import write_weights
from tests.support.hf_tiny import N_TOKENS, SHAPE, random_model, rope, save_folder

Tensors = dict[str, Tensor]
Layer = Callable[[np.random.Generator, int, int], tuple[Tensors, Tensor]]  # of d_out, d_in: parts, float32 weights
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each four bits of a word have, from the lowest


def pack(codes: np.ndarray, bits: int, order: tuple[int, ...] = (), minus_one: bool = False) -> Tensor:
    """Pack codes along the last dimension in words of 32 bits; minus_one: subtract 1 from each code, with borrows."""
    n_code = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // n_code)), dtype=np.uint64)
    for column in range(codes.shape[-1]):
        word, place = divmod(column, n_code)
        place = order.index(place) if order else place
        words[..., word] |= codes[..., column].astype(np.uint64) << np.uint64(bits * place)
    if minus_one:
        words += np.uint64((1 << 32) - sum(1 << (bits * place) for place in range(n_code)))
    return torch.from_numpy((words & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32))


def draw(rng: np.random.Generator, bits: int, d_out: int, d_in: int, group: int, is_reordered: bool = False) -> Any:
    """Return codes, zero points with both extremes, float16 scales, the group of each input, and weights."""
    n_group = -(-d_in // group)
    codes, zeros = (rng.integers(0, 1 << bits, (d_out, n)) for n in (d_in, n_group))
    zeros[0], zeros[1], zeros[8:12] = 0, (1 << bits) - 1, 0
    scales = rng.uniform(0.01, 0.02, (d_out, n_group)).astype(np.float16)
    groups = np.arange(d_in) // group
    groups = rng.permutation(groups) if is_reordered else groups
    weights = torch.zeros(d_out, d_in)
    for i, g in enumerate(groups):
        weights[:, i] = torch.from_numpy((codes[:, i] - zeros[:, g]) * scales[:, g].astype(np.float32))
    return codes, zeros, torch.from_numpy(scales), torch.from_numpy(groups.astype(np.int32)), weights


def awq(rng: np.random.Generator, d_out: int, d_in: int, group: int = 32) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, _, weights = draw(rng, 4, d_out, d_in, group)
    qweight, qzeros = (pack(each.T, 4, AWQ_OUTPUTS) for each in (codes, zeros))
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales.T.contiguous()}, weights


def gptq(
    rng: np.random.Generator,
    d_out: int,
    d_in: int,
    bits: int = 4,
    group: int = 32,
    is_reordered: bool = False,
    version: int = 1,
) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, groups, weights = draw(rng, bits, d_out, d_in, min(group, d_in), is_reordered)
    parts = {"qweight": pack(codes, bits).T, "qzeros": pack(zeros.T, bits, minus_one=version == 1), "scales": scales.T}
    parts |= {"bias": torch.zeros(d_out, dtype=torch.float16), "g_idx": groups}
    return {name: tensor.contiguous() for name, tensor in parts.items()}, weights


def fp8(
    rng: np.random.Generator, d_out: int, d_in: int, rows: int = 32, columns: int = 16, scale: str = "weight_scale_inv"
) -> tuple[Tensors, Tensor]:
    """Blocks larger than all layers: a scale without dimensions, and that of the inputs."""
    codes = torch.from_numpy(rng.normal(0, 100, (d_out, d_in))).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.uniform(1e-3, 2e-3, (-(-d_out // rows), -(-d_in // columns)))).float()
    weights = codes.float()
    for i in range(d_out):
        for j in range(scales.shape[1]):
            weights[i, j * columns : (j + 1) * columns] *= scales[i // rows, j]
    parts = {"weight": codes, scale: scales}
    return parts | ({scale: scales[0, 0], "input_scale": torch.ones(())} if scales.numel() == 1 else {}), weights


def packed(
    rng: np.random.Generator, d_out: int, d_in: int, zeros_packed: bool = True, is_reordered: bool = False
) -> tuple[Tensors, Tensor]:
    """compressed-tensors in 4 bits with zero points; in older files these are bytes, and inputs have an order."""
    codes, zeros, scales, groups, weights = draw(rng, 4, d_out, d_in, 16, is_reordered)
    stored = pack(zeros.T, 4).T.contiguous() if zeros_packed else torch.from_numpy((zeros - 8).astype(np.int8))
    parts = {"weight_packed": pack(codes, 4), "weight_shape": torch.tensor([d_out, d_in]), "weight_scale": scales}
    return parts | {"weight_zero_point": stored} | ({"weight_g_idx": groups} if is_reordered else {}), weights


def compressed(kind: str, bits: int, file_format: str, symmetric: bool = True, **settings: Any) -> dict[str, Any]:
    """Return the quantization_config of compressed-tensors. settings: strategy, and size of blocks."""
    weights = {"type": kind, "num_bits": bits, "symmetric": symmetric, **settings}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    scheme = {"quant_method": "compressed-tensors", "format": file_format, "config_groups": groups}
    return scheme | {"quantization_status": "compressed", "ignore": ["lm_head", "model.layers.1.mlp.up_proj"]}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 16]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
PACKED = compressed("int", 4, "pack-quantized", symmetric=False, strategy="group", group_size=16)
LAYERS: dict[str, tuple[dict[str, Any], Layer, str]] = {  # quantization_config, layers, published
    "awq": (AWQ, awq, "AWQ4"),
    "awq, an incomplete group": (AWQ | {"group_size": 64}, partial(awq, group=64), "AWQ4"),
    "gptq": (GPTQ, gptq, "GPTQ4"),
    "gptq in act-order": (
        GPTQ | {"group_size": 64, "desc_act": True, "checkpoint_format": "gptq"},
        partial(gptq, group=64, is_reordered=True),
        "GPTQ4",
    ),
    "gptq v2, 8 bits": (
        GPTQ | {"bits": 8, "group_size": 128, "checkpoint_format": "gptq_v2"},
        partial(gptq, bits=8, group=128, version=2),
        "GPTQ8",
    ),
    "gptq, 8 bits, whole columns": (
        GPTQ | {"bits": 8, "group_size": -1},
        partial(gptq, bits=8, group=1 << 20),
        "GPTQ8",
    ),
    "fp8, incomplete blocks": (FP8 | {"weight_block_size": [48, 40]}, partial(fp8, rows=48, columns=40), "FP8"),
    "fp8, a scale for each tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        partial(fp8, rows=1 << 20, columns=1 << 20, scale="weight_scale"),
        "FP8",
    ),
    "packed": (PACKED, packed, "INT4"),
    "packed, older": (PACKED, partial(packed, zeros_packed=False, is_reordered=True), "INT4"),
}


def quantize_folder(plain: Path, folder: Path, scheme: dict[str, Any], layer: Layer, dtype: torch.dtype) -> Tensors:
    """Write a quantised model of the shape of a plain safetensors folder; return its weights, not rounded to `dtype`.

    One layer stays as it is. All other tensors are in `dtype`.
    """
    rng, stored, weights = np.random.default_rng(0), Tensors(), Tensors()
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight") and name != "model.layers.1.mlp.up_proj.weight":
            parts, weights[name] = layer(rng, *tensor.shape)
            stored |= {f"{name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}
        else:
            stored[name] = weights[name] = tensor.to(dtype)
    folder.mkdir(exist_ok=True)
    for file in plain.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    described = json.loads((plain / "config.json").read_text()) | {"quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(described))
    write_weights(folder, stored, "sharded safetensors")
    return weights


NO_SPECIAL_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
MODELS = {"llama": LlamaConfig(**SHAPE | rope(10000.0)), "phi-3": Phi3Config(**SHAPE | NO_SPECIAL_TOKENS)}
Q, GATE = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.gate_proj"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    for name, folder in folders.items():
        save_folder(random_model(MODELS[name]), folder)
    return folders


# The family, the dtype of layers that are not quantised, and --dtype.
STORED = [("llama", "float16", None), ("llama", "bfloat16", "float32"), ("phi-3", "bfloat16", None)]


@pytest.mark.parametrize(("kind", "stored"), [*zip(LAYERS, cycle(STORED), strict=False)])
def test_quantised_weights_are_rounded_once(kind: str, stored: Any, plain: dict[str, Path], tmp_path: Path) -> None:
    """The model is that of a plain checkpoint, whether or not it is converted in the folder of its source."""
    (scheme, layer, published), (family, dtype, chosen) = LAYERS[kind], stored
    folder, reference, out = tmp_path / "quantised", tmp_path / "reference", tmp_path / "out"
    weights = quantize_folder(plain[family], folder, scheme, layer, getattr(torch, dtype))
    save_folder(random_model(MODELS[family]), reference)
    write_weights(reference, {k: v.to(getattr(torch, chosen or dtype)) for k, v in weights.items()}, "safetensors")
    convert(reference, reference)
    expected = read_checkpoint(reference)[1]
    for target in (out, folder):
        convert(folder, target, dtype=chosen)
        seen = read_checkpoint(target)[1]
        assert seen.keys() == expected.keys()
        assert all(seen[name].dtype == expected[name].dtype for name in expected)
        assert all(torch.equal(seen[name], expected[name]) for name in expected)
        assert find_model(str(target), "pth", None, "--model").published == sorted([published, dtype])
        assert read_manifest(target)["stored"] == [chosen or dtype]
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    written = (folder / "model.pth").stat().st_mtime_ns
    convert(folder, folder, dtype=chosen)
    assert (folder / "model.pth").stat().st_mtime_ns == written
    load_model(folder)


def compressed_by_library(scheme: dict[str, Any]) -> Layer:
    """Return what quantises random weights by the largest of each group, and packs them, by compressed-tensors."""
    settings = scheme["config_groups"]["group_0"]["weights"]
    library = BaseCompressor.get_value_from_registry(scheme["format"])
    plan = QuantizationScheme(targets=[], weights=settings)

    def layer(rng: np.random.Generator, d_out: int, d_in: int) -> tuple[dict[str, Tensor], Tensor]:
        weight = torch.from_numpy(rng.normal(0, d_in**-0.5, (d_out, d_in))).float()
        rows, columns = settings.get("block_structure") or (1, settings.get("group_size") or d_in)
        blocks = weight.view(d_out // rows, rows, d_in // columns, columns)
        blocks = weight.view(1, d_out, 1, d_in) if settings["strategy"] == "tensor" else blocks
        low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
        largest = 448 if settings["type"] == "float" else (1 << (settings["num_bits"] - 1)) - 1
        scale = torch.maximum(-low, high) / largest
        zero = torch.zeros_like(scale, dtype=torch.int8)
        if not settings["symmetric"]:
            scale = (high - low) / (2 * largest + 1)
            zero = ((-low / scale).round() - largest - 1).to(torch.int8)
        if settings["strategy"] == "tensor":
            scale, zero = scale.view(1), zero.view(1)
        parts = library.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, plan)
        return {name: tensor.contiguous() for name, tensor in parts.items()}, weight

    return layer


COMPRESSED = [
    compressed("int", 4, "pack-quantized", strategy="group", group_size=32),
    PACKED,
    compressed("int", 8, "pack-quantized", symmetric=False, strategy="channel"),
    compressed("int", 8, "int-quantized", symmetric=False, strategy="channel"),
    compressed("int", 8, "int-quantized", strategy="tensor"),
    compressed("float", 8, "float-quantized", strategy="channel"),
    compressed("float", 8, "float-quantized", strategy="block", block_structure=[32, 16]),
]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("scheme", [FP8, *COMPRESSED], ids=lambda scheme: scheme.get("format", "fp8"))
def test_quantised_models_have_the_logits_of_transformers(scheme, plain: dict[str, Path], tmp_path: Path) -> None:
    is_fp8 = scheme is FP8
    quantize_folder(plain["llama"], tmp_path, scheme, fp8 if is_fp8 else compressed_by_library(scheme), torch.float32)
    options = FineGrainedFP8Config(dequantize=True) if is_fp8 else CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    convert(tmp_path, tmp_path)
    ours = load_model(tmp_path)
    for length in (19, 48):
        tokens = torch.randint(N_TOKENS, (1, length), generator=torch.Generator().manual_seed(length))
        seen = ours(tokens, torch.arange(length)[None], FullKVCache(ours.config, 1, length))
        torch.testing.assert_close(seen, theirs(tokens).logits, rtol=0, atol=1e-5)


DAMAGE: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scales": ("awq", lambda x: x.pop(f"{Q}.scales"), f"{Q}.scales"),
    "no zero points": ("packed", lambda x: x.pop(f"{Q}.weight_zero_point"), f"{Q}.weight_zero_point"),
    "no FP8 scales": ("fp8, incomplete blocks", lambda x: x.pop(f"{GATE}.weight_scale_inv"), f"{GATE}.weight_scale"),
    "a group less": ("awq", lambda x: x.update({f"{Q}.scales": x[f"{Q}.scales"][1:]}), f"{Q}.scales"),
    "another shape": ("packed", lambda x: x[f"{Q}.weight_shape"].add_(8), f"{Q}.weight_packed"),
    "a group too many": ("gptq in act-order", lambda x: x[f"{GATE}.g_idx"].add_(1), "1 of 1"),
    "an infinite scale": ("gptq", lambda x: x[f"{Q}.scales"].fill_(torch.inf), "wqkv"),
    "a bias": ("gptq", lambda x: x[f"{Q}.bias"].add_(1), f"{Q}.bias"),
    "scales of keys": ("fp8, incomplete blocks", lambda x: x.update({f"{Q}.k_scale": torch.ones(1)}), f"{Q}.k_scale"),
    "a quantised embedding": (
        "fp8, incomplete blocks",
        lambda x: x.update({"model.embed_tokens.weight": torch.ones(N_TOKENS, 64).to(torch.float8_e4m3fn)}),
        "embed_tokens",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_quantised_checkpoint_is_refused(damage: str, plain: dict[str, Path], tmp_path: Path) -> None:
    kind, change, named = DAMAGE[damage]
    scheme, layer, _ = LAYERS[kind]
    quantize_folder(plain["llama"], tmp_path, scheme, layer, torch.float16)
    shards = sorted(tmp_path.glob("*.safetensors"))
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    change(tensors)
    for left in (*shards, tmp_path / "model.safetensors.index.json"):
        left.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as refusal:
        convert(tmp_path, tmp_path)
    assert named in str(refusal.value)
    assert sorted(tmp_path.iterdir()) == before


TWO_KINDS = {"group_0": PACKED["config_groups"]["group_0"], "group_1": {"targets": ["re:.*o_proj"], "weights": {}}}
REFUSED: list[dict[str, Any]] = [
    {"quant_method": "bitsandbytes", "load_in_4bit": True},
    {"bits": 4},
    FP8 | {"fmt": "e5m2"},
    FP8 | {"kv_cache_scheme": {"num_bits": 8}},
    AWQ | {"version": "gemv"},
    AWQ | {"zero_point": False},
    GPTQ | {"checkpoint_format": "marlin"},
    GPTQ | {"dynamic": {"-:.*mlp.*": {}}},
    compressed("float", 4, "nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
    compressed("int", 4, "marlin-24", strategy="channel"),
    PACKED | {"config_groups": TWO_KINDS},
    PACKED | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
    PACKED | {"transform_config": {"config_groups": {"R1": {}}}},
]


@pytest.mark.parametrize("scheme", REFUSED, ids=lambda scheme: scheme.get("quant_method"))
def test_other_schemes_are_refused_by_name(scheme: dict[str, Any], plain: dict[str, Path], tmp_path: Path) -> None:
    quantize_folder(plain["llama"], tmp_path, scheme, fp8, torch.float16)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=f"quantised by {scheme.get('quant_method')}"):
        convert(tmp_path, tmp_path)
    assert sorted(tmp_path.iterdir()) == before
