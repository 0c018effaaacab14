"""What the command lines in tests/snapshots/ name: tiny checkpoints, damaged copies of them, shapes, texts, records."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_tiny import random_model, save_folder
from published_heads import eagle_config, eagle_tensors, medusa_tensors, save_head
from transformers import LlamaConfig

from convert_hf_checkpoint import convert
from models import ModelConfig


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_values(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps(json.loads(content) | changes).encode()


def with_words(**ids: int) -> Callable[[bytes], bytes]:
    """A tokenizer with other ids."""

    def change(content: bytes) -> bytes:
        tokenizer = json.loads(content)
        tokenizer["model"]["vocab"] |= ids
        return json.dumps(tokenizer).encode()

    return change


Changes = dict[str, Callable[[bytes], bytes] | None]
# Checkpoints of which something is wrong: copies of what, and what becomes of their files, None for nothing.
UNLISTED: Changes = {"manifest.json": None}
DAMAGED: dict[str, tuple[str, Changes]] = {
    "weightless": ("checkpoint", {"model.pth": None}),
    "configless": ("checkpoint", {"config.json": None}),
    "wordless": ("checkpoint", {"tokenizer.json": None}),
    "cut": ("checkpoint", {"model.pth": half, **UNLISTED}),
    "no_json": ("checkpoint", {"config.json": half, **UNLISTED}),
    "a_list": ("checkpoint", {"config.json": lambda content: b"[]", **UNLISTED}),
    "other_config": ("checkpoint", {"config.json": with_values(intermediate_size=100), **UNLISTED}),
    "listed_config": ("checkpoint", {"config.json": with_values(rms_norm_eps=1)}),
    "bad_manifest": ("checkpoint", {"manifest.json": half}),
    "more_words": ("checkpoint", {"tokenizer.json": with_words(**{"1": 257}), **UNLISTED}),
    "other_words": ("checkpoint", {"tokenizer.json": with_words(a=66, b=65), **UNLISTED}),
    "no_tokenizer_json": ("checkpoint", {"tokenizer.json": lambda content: b"{", **UNLISTED}),
    "no_weights": ("download", {"model.safetensors": None}),
    "cut_weights": ("download", {"model.safetensors": half}),
    "no_norm": ("download", {"model.safetensors": lambda content: content.replace(b"model.norm.w", b"model.nrom.w")}),
    "other_sizes": ("download", {"config.json": with_values(intermediate_size=100)}),
    "nan_weights": ("download", {"model.safetensors": lambda content: content[:-4] + b"\0\0\xc0\x7f"}),
    "no_words": ("download", {"tokenizer.json": None}),
}


def make_workspace(folder: Path, made: dict[str, Any]) -> None:
    """What the command lines name, in their working directory, as workspace.json says."""
    (folder / "download").mkdir()
    save_folder(random_model(LlamaConfig(**made["model"])), folder / "download")
    (folder / "download" / "generation_config.json").unlink(missing_ok=True)
    (folder / "download" / "config.json").write_text(json.dumps(made["model"]))
    with contextlib.redirect_stderr(io.StringIO()):
        convert(folder / "download", folder / "checkpoint")
    for name, (source, changes) in DAMAGED.items():
        shutil.copytree(folder / source, folder / name)
        for file, change in changes.items():
            path = folder / name / file
            before = path.read_bytes()
            path.unlink()
            if change:
                path.write_bytes(change(before))
    target = ModelConfig.from_json(folder / "download" / "config.json")
    save_head(folder / "eagle", eagle_tensors(target), eagle_config(target, eagle_aux_hidden_state_layer_ids=[0, 1, 2]))
    save_head(folder / "unread", eagle_tensors(target), eagle_config(target))
    save_head(folder / "medusa", medusa_tensors(target), {"medusa_num_layers": 2}, "medusa_lm_head.pt")
    configs = {f"{name}/config.json": json.dumps(made["model"] | values) for name, values in made["shapes"].items()}
    for name, content in (configs | made["files"]).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode("latin-1"))
