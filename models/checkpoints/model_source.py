"""A model that can be loaded: a converted checkpoint, or a shape for random weights."""

import hashlib
import mmap
import os
import sys
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.errors import CheckpointError, refuse, refuse_checkpoint
from models.checkpoints import manifest as files
from models.checkpoints.chat_template import ChatTemplate, load_chat_template
from models.checkpoints.config_changes import NO_CHANGES, ConfigChanges
from models.checkpoints.default_model import DEFAULT_CHECKPOINT, DEFAULT_NAME
from models.checkpoints.hf_config import config_from_hf, read_config, read_generation_config, with_end_tokens
from models.checkpoints.loading import CONVERT, advise, load_model, read_checkpoint
from models.checkpoints.presets import PRESETS, preset_name
from models.checkpoints.tokenizer import Tokenizer, load_tokenizer
from models.config import ModelConfig
from models.llama import Transformer

# Pieces of a tensor that tell checkpoints of the same shape apart, and the bytes of each: a few pages of a mapped file.
N_PIECES, PIECE_BYTES = 4, 4096


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded, or a head for one.

    path: the checkpoint, or the name of a published shape. name: the name in records.
    is_changed: True if `config` differs from the checkpoint's.
    most_drafts: tokens that it can draft in a round.
    borrowed: parts of the target that it uses because it lacks them.
    """

    path: str
    load_format: str
    config: ModelConfig
    name: str
    is_changed: bool = False
    most_drafts: int = sys.maxsize
    borrowed: tuple[str, ...] = ()

    @property
    def has_text(self) -> bool:
        """False for random weights, which have no tokenizer and no acceptance rate worth measuring, and for heads."""
        return self.load_format == "pth"

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors as they are stored, mapped into memory; of random weights, none."""
        config = self.config if self.is_changed else None
        return read_checkpoint(self.path, config=config)[1].items() if self.has_text else ()

    def digest(self, whole: bool) -> str:
        """Return a digest of the tensors' names, shapes, dtypes and contents: all bytes, or pieces of each tensor."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors(), key=itemgetter(0)):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content = tensor.reshape(-1).view(torch.uint8).numpy()
            starts = (len(content) * piece // N_PIECES for piece in range(N_PIECES))
            if not whole:  # without reading megabytes ahead of each piece
                first = content.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
                advise(first, content.ctypes.data + len(content), "MADV_RANDOM")
            for part in [content] if whole else [content[start : start + PIECE_BYTES] for start in starts]:
                digest.update(part.data)
        return digest.hexdigest()[:16]

    @property
    def manifest_sha256(self) -> str | None:
        """SHA-256 of the checkpoint's manifest, which describes all files; None without a manifest."""
        manifest = _folder(self.path) / files.MANIFEST
        return files.sha256_of(manifest) if manifest.is_file() else None

    @property
    def published(self) -> list[str]:
        """Names of the dtypes in which the matrices were published (`SourceTensor`); empty if that is unknown. Random
        weights are those of bfloat16."""
        if self.load_format == "dummy":
            return ["bfloat16"]
        return list(files.read_manifest(_folder(self.path)).get("converted_from", {}).get("published", ()))

    def generation_config(self) -> dict[str, Any]:
        """Read the checkpoint's generation_config.json, empty without the file. Raises ConfigError."""
        return read_generation_config(_folder(self.path))

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(_folder(self.path))

    def chat_template(self) -> ChatTemplate:
        return load_chat_template(_folder(self.path), self.tokenizer())

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Token ids that end an answer: those of generation_config.json or config.json, and the chat template's."""
        turn = list[int]()
        with suppress(CheckpointError):  # no chat template, or a damaged one
            turn = self.chat_template().end_of_turn() if self.has_text else []
        ends = (*self.config.eos_tokens, *(token for token in turn if token < self.config.vocab_size))
        return tuple(dict.fromkeys(ends))

    def check_tokens(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise CheckpointError if the tokenizer made ids that the model lacks. Ids without a token are fine."""
        largest, vocab_size = max(map(max, prompts)), self.config.vocab_size
        if largest >= vocab_size:
            what, required = "the tokenizer is not this model's", f"0 <= id < {vocab_size}, ids of {self.name}"
            refuse_checkpoint(_folder(self.path), f"token id {largest} in a prompt", required, what)

    def load(self, **options: Any) -> Transformer:
        """Load the model. options: see `load_model`."""
        config = self.config if self.is_changed or not self.has_text else None
        return load_model(self.path, config=config, load_format=self.load_format, **options)


def find_model(
    path: str, load_format: str, name: str | None, where: str, changes: ConfigChanges = NO_CHANGES
) -> ModelSource:
    """Find the model that the flag `where` names, and check that its weights are there and whole, without reading them.
    A path to random weights need not exist: its folder may have the name of a published configuration. Raises
    CheckpointError, ConfigError."""
    folder = _folder(path)
    is_default = folder.resolve() == DEFAULT_CHECKPOINT.resolve()
    if load_format == "dummy" and (name or not os.path.exists(folder / files.CONFIG)):
        preset = preset_name(name or path)
        config = config_from_hf(changes.apply(PRESETS[preset], preset), where=preset)
        return ModelSource(path, load_format, config, name or preset)
    weights = folder / files.WEIGHTS if os.path.isdir(path) else Path(path)
    if load_format != "dummy":
        files.check_files(folder, (weights.name, files.CONFIG))
        if not zipfile.is_zipfile(weights):
            required = f"the {files.WEIGHTS} that {CONVERT} makes of a download, or its folder"
            steps = f"download.py --repo_id REPO_ID --out_dir {folder}, then {CONVERT} --checkpoint_dir {folder}"
            fix = "run `make demo`" if is_default else f"check the spelling, or run {steps}"
            refuse_checkpoint(where, path, required, "there is no converted checkpoint", fix=fix)
    in_file = str(folder / files.CONFIG)
    values = with_end_tokens(read_config(folder / files.CONFIG), folder)
    config = config_from_hf(changes.apply(values, in_file), where=in_file)
    name = name or (DEFAULT_NAME if is_default else folder.resolve().name)
    return ModelSource(path, load_format, config, name, changes != NO_CHANGES)


def check_vocabulary(target: ModelSource, draft: ModelSource) -> str | None:
    """Check that every token id has the same meaning in two models; return a remark if one model has further ids.
    Random weights have no tokens, and only their sizes count. Raises ConfigError naming the first id that differs."""
    if target.has_text and draft.has_text:
        ours, theirs = target.tokenizer().pieces(), draft.tokenizer().pieces()
        for token, pieces in enumerate(zip(theirs, ours, strict=False)):
            if pieces[0] != pieces[1]:
                where, seen = f"token id {token} of {draft.name} and {target.name}", "{!r} and {!r}".format(*pieces)
                what = "the draft has another vocabulary than the target"
                fix = f"use a draft of the target's family, or make one: {CONVERT} --drop_layers"
                refuse(where, seen, "the same token for every id", what, fix)
    (fewer, _), (more, owner) = sorted((source.config.vocab_size, source.name) for source in (target, draft))
    return f"only {owner} has the token ids {fewer} to {more - 1}, which are never drafted" if fewer < more else None


def _folder(path: str) -> Path:
    """Return a checkpoint's folder. A path that does not exist counts as a file if it ends in .pth."""
    is_file = os.path.isfile(path) or (path.endswith(".pth") and not os.path.isdir(path))
    return Path(path).parent if is_file else Path(path)
