"""Write a model.pth, read it, and load it as a Transformer."""

import ctypes
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from common.errors import refuse, refuse_checkpoint
from models.attention import select_backend
from models.checkpoints import manifest as files
from models.checkpoints.convert import require_finite, source_parts
from models.checkpoints.hf_config import config_from_json
from models.checkpoints.presets import preset_config
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.config import ModelConfig
from models.kernels.packed_linear import can_pack, pack_linears, packed_linear
from models.kernels.pointwise import use_pointwise
from models.kernels.pointwise_cpp import pointwise_for
from models.kernels.quantize import Int8Linear, check_scheme, quantize_linears, quantized_linear
from models.llama import Transformer, attention_spec, logits_dtype
from models.repeated_blocks import repeat_blocks
from models.tensor_parallel import WHOLE, ModelRanks, check_count, parallelise, shard_config, shard_tensor

CONVERT = "convert_hf_checkpoint.py"
Value = TypeVar("Value")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the state dict of a model.pth. `wqkv` stacks the rows of q, k and v (rotary pairs in
    half-split layout), `w13` the rows of gate and up. A tied head is not stored."""
    parts = source_parts(config).items()
    return {name: (sum(shape[0] for _, shape in stacked), *stacked[0][1][1:]) for name, stacked in parts}


def drop_layers(
    state_dict: Mapping[str, Value], config: ModelConfig, layers: Iterable[int]
) -> tuple[dict[str, Value], ModelConfig]:
    """Remove layers from a state dict and its config, and renumber the rest. Values are shared, not copied. Raises
    ConfigError for an index that is no layer, or if no layer would be left."""
    dropped = set(layers)
    kept = [layer for layer in range(config.n_layer) if layer not in dropped]
    if not dropped <= set(range(config.n_layer)) or not kept:
        refuse("layers to drop", sorted(dropped), f"some, not all, of layers 0 to {config.n_layer - 1}")
    shallower: dict[str, Value] = {}
    for name, value in state_dict.items():
        module, *rest = name.split(".", 2)
        if module != "layers":
            shallower[name] = value
        elif int(rest[0]) in kept:
            shallower[f"layers.{kept.index(int(rest[0]))}.{rest[1]}"] = value
    return shallower, config.with_layers(kept)


def save_checkpoint(path: Path, config: ModelConfig, state_dict: Mapping[str, Tensor]) -> None:
    """Write a model.pth atomically. The caller updates the manifest. Raises CheckpointError."""
    content = {"config": asdict(config), "state_dict": dict(state_dict)}
    with files.atomic_path(path) as partial:
        torch.save(content, partial)


def read_checkpoint(path: str | Path, *, config: ModelConfig | None = None) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Map a model.pth into memory and check it against its config and manifest.

    path: the file, or its folder.
    config: runs the model instead of the config.json next to it; it must have tensors of the same shapes.
    Returns the config and CPU tensors in the stored dtypes, backed by the file. Raises CheckpointError, ConfigError.
    """
    path = Path(path)
    path = path if path.suffix == ".pth" else path / files.WEIGHTS
    if not path.is_file():
        fix = f"run download.py, then {CONVERT} --checkpoint_dir FOLDER"
        refuse_checkpoint(path, "no such file", f"a {files.WEIGHTS}, or a folder with one", fix=fix)
    expected = config or config_from_json(path.parent / files.CONFIG)
    files.check_files(path.parent, (path.name, files.CONFIG, *TOKENIZER_FILES))
    _check_sources(path)
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        stored, state_dict = ModelConfig.from_dict(content["config"]), dict(content["state_dict"])
        shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    except Exception as error:  # a damaged zip or pickle raises almost anything
        refuse_checkpoint(path, repr(error)[:200], f"a {files.WEIGHTS} written by {CONVERT}")
    stored = replace(stored, eos_tokens=expected.eos_tokens)  # the weights are no other with other end tokens
    if config is None and stored != expected:
        differing = [name for name in asdict(stored) if getattr(stored, name) != getattr(expected, name)]
        seen, required = (", ".join(f"{name} {getattr(x, name)}" for name in differing) for x in (stored, expected))
        refuse_checkpoint(path, seen, f"{required} ({files.CONFIG})", "the weights belong to another config")
    if shapes != (required_shapes := expected_shapes(expected)):
        unknown, missing = sorted(shapes.items() - required_shapes.items()), required_shapes.items() - shapes.items()
        refuse_checkpoint(path, unknown[:4], sorted(missing)[:4], "the tensors are not the config's")
    return expected, state_dict


def _check_sources(path: Path) -> None:
    """Raise CheckpointError if weights next to a model.pth were saved again after it was converted from them."""
    for name, entry in files.read_manifest(path.parent).get("converted_from", {}).get("files", {}).items():
        source = path.parent / name
        if name not in files.SIDE_FILES and source.is_file() and files.differing(source, entry):
            refuse_checkpoint(source, "other content, saved again after the conversion", f"the weights in {path.name}")


def _dummy_weights(config: ModelConfig, device: str | torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return norms of ones, and other weights normal with deviation 0.02 and rounded to bfloat16, like most published
    weights; the same in each call."""
    generator = torch.Generator(device).manual_seed(0)
    weights = {name: torch.ones(shape, device=device, dtype=dtype) for name, shape in expected_shapes(config).items()}
    for name, tensor in weights.items():
        if not name.endswith("norm.weight"):
            tensor.copy_(tensor.normal_(0, 0.02, generator=generator).bfloat16())
    return weights


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    load_format: str = "pth",
    config: ModelConfig | None = None,
    prepack: bool = True,
    layers: Sequence[int] | None = None,
    exchange: ModelRanks | None = None,
    attention: str = "auto",
    quantize: str | None = None,
) -> Transformer:
    """Load a Transformer for inference, its weights in `dtype` on `device`.

    Args:
        path: a model.pth, or its folder.
        load_format: "pth", or "dummy" for random weights of `config`'s shape, or of the preset named `path`.
        prepack: repack linear layers for the CPU: faster, but their weights leave the state dict.
        layers: load only these layers.
        exchange: read only this rank's shard, and connect it to the other ranks.
        attention: see `select_backend`.
        quantize: "int8" or "int4" (`models.kernels.quantize`).
    Raises: what `read_checkpoint` raises; ConfigError also for another `load_format`, and for more ranks than KV heads;
        CheckpointError also for weights that are not finite in `dtype`.
    """
    if load_format not in ("pth", "dummy"):
        refuse("load_format", load_format, "pth, or dummy for random weights")
    state_dict: dict[str, Tensor] = {}
    if load_format == "dummy":
        config = config or preset_config(str(path))
    else:
        config, state_dict = read_checkpoint(path, config=config)
    if layers is not None:
        state_dict, config = drop_layers(state_dict, config, set(range(config.n_layer)).difference(layers))
    if quantize:
        check_scheme(quantize, device, config.n_expert)
    shard = exchange.shard if exchange else WHOLE
    check_count(config, shard.count, str(path))
    part = shard_config(config, shard)
    with torch.device("meta"):
        model = Transformer(part).eval().requires_grad_(False)
    model.backend = select_backend(attention, device, attention_spec(part, dtype)).backend
    if load_format == "dummy":
        state_dict = _dummy_weights(part, device, dtype)
    # Load block by block, so that at most a block is in memory twice.
    blocks = dict(model.named_children()) | {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    del blocks["layers"]
    for module, block in blocks.items():
        weights = {}
        for parameter, _ in block.named_parameters():
            name = f"{module}.{parameter}"
            tensor = state_dict.pop(name)
            if load_format != "dummy":
                tensor = _copy_out(tensor, shard_tensor(name, tensor, config, shard), device, dtype)
                require_finite(Path(path), name, tensor)
            weights[parameter] = tensor
        block.load_state_dict(weights, assign=True)
        if quantize and module.startswith("layers."):
            quantize_linears(block, quantize)
        if prepack:
            pack_linears(block)
    if quantize:
        quantize_head(model)
    if prepack:
        pack_model(model)
    if exchange is not None:
        parallelise(model, config, exchange)
    use_pointwise(model, pointwise_for(model.backend.name))
    repeat_blocks(model)
    return model


def _copy_out(mapped: Tensor, part: Tensor, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """Copy `part`, a view of `mapped` or made from it, and give the pages of `mapped` back: otherwise the resident set
    would grow by the whole file, of which a shard may need a fraction."""
    # Pages of the storage, not of the tensor: a tensor with a stride of 0 is larger than its part of the file.
    storage = mapped.untyped_storage()
    is_view = part.untyped_storage().data_ptr() == storage.data_ptr()
    copied = part.to(device=device, dtype=dtype, copy=is_view, memory_format=torch.contiguous_format)
    if copied.is_cuda:
        torch.cuda.synchronize(copied.device)
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    advise(first, end, "MADV_DONTNEED")  # a system without it keeps them until the file is unmapped
    return copied


def advise(first: int, end: int, advice: str) -> None:
    """Tell the system how the pages from address `first`, the beginning of a page, to `end` are used."""
    if end > first and hasattr(mmap, advice):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), getattr(mmap, advice))


def pack_model(model: Transformer) -> None:
    """Pack all linear layers of a Transformer; a tied head gets a packed copy, the embedding stays."""
    embedding = model.tok_embeddings.weight
    if model.output is None and can_pack(embedding.device, embedding.dtype):
        model.output = packed_linear(embedding)
    pack_linears(model)


def quantize_head(model: Transformer) -> None:
    """Quantise the head to int8 in either scheme: 4 bits cost too much accuracy. The embedding stays."""
    weight = model.output.weight if isinstance(model.output, nn.Linear) else model.tok_embeddings.weight
    head = quantized_linear(weight, None, "int8")
    if isinstance(head, Int8Linear):
        head.result_dtype = logits_dtype
        model.output = head
