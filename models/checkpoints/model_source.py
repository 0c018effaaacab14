"""A benchmark's model before it is loaded: a converted checkpoint, or a shape for random weights."""

import os
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError
from models.checkpoints.chat_template import ChatTemplate, load_chat_template
from models.checkpoints.default_model import DEFAULT_CHECKPOINT, DEFAULT_NAME
from models.checkpoints.loading import CONVERT, load_model
from models.checkpoints.manifest import (
    CONFIG,
    MANIFEST,
    WEIGHT_PATTERNS,
    WEIGHTS,
    check_files,
    read_manifest,
    sha256_of,
)
from models.checkpoints.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from models.config import ModelConfig, read_config
from models.config_changes import NO_CHANGES, ConfigChanges
from models.llama import Transformer
from models.presets import PRESETS, preset_name


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded. path: of its checkpoint, or a name of its shape. name: for records."""

    path: str
    load_format: str
    config: ModelConfig
    name: str
    verify: bool = False
    is_changed: bool = False  # whether `config` differs from the checkpoint's

    @property
    def has_text(self) -> bool:
        """False for random weights, which have no tokenizer and no acceptance rate worth measuring."""
        return self.load_format != "dummy"

    @property
    def is_default(self) -> bool:
        """True for the built-in model as it was fetched; models derived from it are others."""
        return _folder(self.path).resolve() == DEFAULT_CHECKPOINT.resolve()

    @property
    def most_drafts(self) -> int:
        """Most tokens that it can draft in a round."""
        return sys.maxsize

    @property
    def borrowed(self) -> tuple[str, ...]:
        """Names of the target's parts that stand in for parts that this model lacks."""
        return ()

    @property
    def manifest_sha256(self) -> str | None:
        """SHA-256 of the checkpoint's manifest, which has the sums of all files; None without a manifest."""
        manifest = _folder(self.path) / MANIFEST
        return sha256_of(manifest) if manifest.is_file() else None

    @property
    def published(self) -> list[str]:
        """Dtypes that the matrices were published in, as in `SourceTensor`; empty if the conversion does not say."""
        return list(read_manifest(_folder(self.path)).get("converted_from", {}).get("published", ()))

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(_folder(self.path))

    def chat_template(self) -> ChatTemplate:
        return load_chat_template(_folder(self.path), self.tokenizer())

    def check_tokens(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise CheckpointError if the tokenizer made ids that the model does not have. Unused ids are fine."""
        largest, vocab_size = max(map(max, prompts)), self.config.vocab_size
        if largest >= vocab_size:
            what, where = "the tokenizer is not this model's", find_tokenizer(_folder(self.path))
            seen, required = f"token id {largest} in a prompt", f"0 <= id < {vocab_size}, the vocabulary of {self.name}"
            fix = "copy the model's own tokenizer into this folder, or download and convert it again"
            raise CheckpointError(what, where, seen, required, fix)

    def load(self, **how: Any) -> Transformer:
        """The model; `how`: as of `load_model`."""
        config = self.config if self.is_changed or not self.has_text else None
        return load_model(self.path, load_format=self.load_format, config=config, verify=self.verify, **how)


def find_model(
    path: str,
    load_format: str,
    name: str | None,
    where: str,
    verify: bool = False,
    changes: ConfigChanges = NO_CHANGES,
) -> ModelSource:
    """Find the model that `where` names, without reading weights: only whether they are there, and whole. A path to
    random weights need not exist: its folder's name is then that of a published configuration. Raises CheckpointError,
    ConfigError."""
    folder = _folder(path)
    is_default = folder.resolve() == DEFAULT_CHECKPOINT.resolve()
    if load_format == "dummy" and (name or not os.path.exists(folder / CONFIG)):
        preset = preset_name(name or path)
        config = ModelConfig.from_hf(changes.apply(PRESETS[preset], preset), where=preset)
        return ModelSource(path, load_format, config, name or preset)
    weights = folder / WEIGHTS if os.path.isdir(path) else Path(path)
    if load_format != "dummy":
        check_files(folder, (weights.name, CONFIG))
        if not zipfile.is_zipfile(weights):
            required, fix = f"the {WEIGHTS} that {CONVERT} makes of a download, or its folder", "run `make demo`"
            if zipfile.is_zipfile(folder / WEIGHTS):
                fix = f"use {folder / WEIGHTS}"
            elif not is_default:
                is_fetched = any(next(folder.glob(pattern), None) for pattern, *_ in WEIGHT_PATTERNS)
                fetch = f"check the spelling, or run download.py --repo_id REPO_ID --out_dir {folder}, then "
                fix = f"{'' if is_fetched else fetch}run: python {CONVERT} --checkpoint_dir {folder}"
            raise CheckpointError("there is no converted checkpoint", where, path, required, fix)
    in_file = str(folder / CONFIG)
    config = ModelConfig.from_hf(changes.apply(read_config(folder / CONFIG), in_file), where=in_file)
    name = name or (DEFAULT_NAME if is_default else folder.resolve().name)
    return ModelSource(path, load_format, config, name, verify, changes != NO_CHANGES)


def check_vocabulary(target: ModelSource, draft: ModelSource) -> str | None:
    """Compare the meaning of every token id in two models; return a remark if one of them has more ids, which come
    last. Models without text are compared by size. Raises ConfigError naming the first id that differs."""
    if target.has_text and draft.has_text:
        ours, theirs = target.tokenizer().pieces(), draft.tokenizer().pieces()
        for token, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
            if mine != its:
                where = f"token id {token} of {draft.name} and {target.name}"
                seen, required = f"{its!r} and {mine!r}", "the same token for every id"
                fix = f"use a draft of the target's family, or make one: {CONVERT} --drop_layers"
                raise ConfigError("the draft has another vocabulary than the target", where, seen, required, fix)
    (fewer, _), (more, owner) = sorted((source.config.vocab_size, source.name) for source in (target, draft))
    return f"only {owner} has the token ids {fewer} to {more - 1}, which are never drafted" if fewer < more else None


def _folder(path: str) -> Path:
    """Return a checkpoint's folder. A path to nothing is taken for a file if it ends in .pth."""
    is_file = os.path.isfile(path) or (path.endswith(".pth") and not os.path.isdir(path))
    return Path(path).parent if is_file else Path(path)
