"""The manifest.json of a checkpoint folder: sizes and samples of its files, and the recipe of the last conversion."""

import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from common.errors import refuse_checkpoint
from common.jsonl import parse_json
from models.checkpoints.hf_config import GENERATION_CONFIG
from models.checkpoints.tokenizer import TOKENIZER_FILES

MANIFEST, WEIGHTS, CONFIG = "manifest.json", "model.pth", "config.json"
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
PARTIAL = ".partial"  # suffix of folders in which files are written
DAY = 24 * 3600
N_PIECES, PIECE_BYTES = 64, 4096  # pieces of a file that are compared, and the bytes of each
SIDE_FILES: tuple[str, ...] = (CONFIG, *TOKENIZER_FILES, TOKENIZER_CONFIG, CHAT_TEMPLATE)
SIDE_FILES += ("special_tokens_map.json", GENERATION_CONFIG)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path in a new folder next to `path`, and on success flush the file there and move it to `path`. Folders
    that a killed writer left more than a day ago are removed. Raises CheckpointError."""
    prefix = f".{path.name}."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(prefix)}*{PARTIAL}"):
            with suppress(OSError):  # another writer removes it
                if time.time() - left.stat().st_mtime > DAY:
                    shutil.rmtree(left, ignore_errors=True)
        with TemporaryDirectory(PARTIAL, prefix, path.parent) as folder:
            partial = Path(folder, path.name)
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # the last two: torch and safetensors, of a full disk
        seen = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        fix = "free some space, or choose another folder"
        refuse_checkpoint(path, seen, "a writable folder with enough free space", "a file cannot be written", fix=fix)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_file(path: Path) -> dict[str, Any]:
    """Return the entry of a file in a manifest: its size in bytes, and the SHA-256 of pieces of it, or of a small file
    as a whole. Other weights of the same shape differ in every piece; a few bits that changed may go unnoticed."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for piece in range(N_PIECES):
            file.seek(max(piece * PIECE_BYTES, (size - PIECE_BYTES) * piece // (N_PIECES - 1)))
            digest.update(file.read(PIECE_BYTES))
    return {"size": size, "sample": digest.hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder: {"files": {name: {"size": bytes, "sample": hex}}, ...}, without files if missing.
    "generated" marks a file that a conversion made from a GGUF's metadata. "converted_from" is the recipe of the last
    conversion; its "published" lists the formats of the source's matrices, and "stored" the dtypes of the result's.
    Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        manifest = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {"files": {}}
        for name, entry in manifest["files"].items():
            if "size" not in entry:
                raise ValueError(f"{name} has no size")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        required = '{"files": {name: {"size": ..., "sample": ...}}}'
        refuse_checkpoint(path, repr(error), required, fix=f"delete {MANIFEST}, and download the checkpoint again")
    return dict(manifest)


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return manifest entries of files by name."""
    return {name: describe_file(folder / name) for name in names}


def update_manifest(folder: Path, entries: dict[str, dict[str, Any]], **extra: Any) -> None:
    """Record `entries` and the `extra` keys, keeping the entries of other files that are still there."""
    manifest = read_manifest(folder)
    kept = {name: entry for name, entry in manifest["files"].items() if (folder / name).exists()}
    text = json.dumps({**manifest, **extra, "files": kept | entries}, indent=2)
    write_text(folder / MANIFEST, text + "\n")


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Compare files with the manifest; files that it does not list pass. Raises CheckpointError naming the file that is
    missing or differs."""
    entries = read_manifest(folder)["files"]
    for name in (name for name in names if name in entries):
        if found := differing(folder / name, entries[name]):
            what = "a file is not the one that the manifest describes (convert --force accepts what was changed)"
            refuse_checkpoint(folder / name, found, f"{entries[name]} ({MANIFEST})", what)


def differing(path: Path, entry: dict[str, Any]) -> str | None:
    """Return what a file is, where that is not what its entry in a manifest says; None if it is."""
    if not path.is_file():
        return "no such file"
    found = describe_file(path)
    return None if all(entry.get(key, value) == value for key, value in found.items()) else str(found)


def downloaded_side_files(folder: Path) -> tuple[str, ...]:
    """Return the side files that came with a folder's weights or were edited, without others that a conversion
    generated."""
    entries = read_manifest(folder)["files"].items()
    generated = {name for name, entry in entries if entry.get("generated") and not differing(folder / name, entry)}
    return tuple(name for name in SIDE_FILES if name not in generated and (folder / name).is_file())
