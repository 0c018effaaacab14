"""Folders of weight files: the model that transformers loads from them, or a refusal that names the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_folders import write_weights
from hf_tiny import N_TOKENS, SHAPE, random_model, rope, save_folder
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from common.errors import CheckpointError
from convert_hf_checkpoint import convert
from kv_cache import FullKVCache
from models import load_model

FORMATS = {"safetensors": ("model", ".safetensors"), "bin": ("pytorch_model", ".bin")}
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
Weights = dict[str, Tensor]


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """Return the weights of a tiny Llama; its folder has config.json and tokenizer, but no weights."""
    model = random_model(LlamaConfig(**SHAPE, **rope(10000.0)))
    save_folder(model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def put(path: Path, weights: Weights) -> None:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)


def get(path: Path) -> Weights:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)


def tie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def assert_as_transformers(folder: Path) -> None:
    convert(folder, folder)
    model, reference = load_model(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(N_TOKENS, (2, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(9).expand(2, -1)
    ours = model(tokens, positions, FullKVCache(model.config, 2, 9))
    torch.testing.assert_close(ours, reference(tokens).logits, rtol=0, atol=1e-5)


def copy_tensor(first: Path, second: Path) -> None:
    """Copy a tensor of the first shard to the second, where the index does not see it."""
    name, tensor = next((name, tensor) for name, tensor in get(first).items() if name != NORM)
    put(second, get(second) | {name: tensor})


# By case: what is done to the index and its two shards, and which file the refusal names.
STRAY: dict[str, tuple[Callable[[Path, Path, Path, Path], object], str]] = {
    "a single file beside the index": (lambda single, index, one, two: put(single, get(one) | get(two)), "single"),
    "a shard of another sharding": (lambda single, index, one, two: put(sharded(single, 3, 3), get(two)), "3-of-3"),
    "a tensor in two shards": (lambda single, index, one, two: copy_tensor(one, two), "two"),
    "a tensor in no shard": (lambda single, index, one, two: list_extra(index, two.name), "two"),
    "no index": (lambda single, index, one, two: index.unlink(), "one"),
}


def sharded(single: Path, number: int, n: int) -> Path:
    return single.with_name(f"{single.stem}-{number:05}-of-{n:05}{single.suffix}")


def list_extra(index: Path, file: str) -> None:
    content = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": content["weight_map"] | {"model.extra.weight": file}}))


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("stray", STRAY)
def test_uncertain_shards_are_refused(tmp_path: Path, weights: Weights, layout: str, stray: str) -> None:
    stem, suffix = FORMATS[layout]
    write_weights(tmp_path, weights, f"sharded {layout}")
    single = tmp_path / f"{stem}{suffix}"
    files = {
        "single": single,
        "one": sharded(single, 1, 2),
        "two": sharded(single, 2, 2),
        "3-of-3": sharded(single, 3, 3),
    }
    apply, named = STRAY[stray]
    apply(single, tmp_path / f"{single.name}.index.json", files["one"], files["two"])
    with pytest.raises(CheckpointError) as refused:
        convert(tmp_path, tmp_path)
    assert files[named].name in str(refused.value)
    assert not (tmp_path / "model.pth").exists()


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("head", ["equal", "absent", "other", "of another size"])
def test_a_tied_output_layer_is_the_embedding(tmp_path: Path, weights: Weights, layout: str, head: str) -> None:
    tie(tmp_path)
    heads = {"equal": weights[EMBEDDING].clone(), "other": weights[EMBEDDING] + 0.01}
    heads["of another size"] = torch.cat([weights[EMBEDDING]] * 2)
    del weights[HEAD]
    write_weights(tmp_path, weights | ({HEAD: heads[head]} if head in heads else {}), layout)
    if head in ("equal", "absent"):
        assert_as_transformers(tmp_path)
    else:
        with pytest.raises(CheckpointError, match=HEAD):
            convert(tmp_path, tmp_path)
