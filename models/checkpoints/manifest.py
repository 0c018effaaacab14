"""The manifest.json of a checkpoint folder: sizes and SHA-256 of its files, and the recipe of the last conversion."""

import glob
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import SafetensorError

from common.errors import CheckpointError, refuse
from common.jsonl import parse_json
from models.checkpoints.hf_config import GENERATION_CONFIG
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.kernels.build import cache_folder

MANIFEST, WEIGHTS, CONFIG = "manifest.json", "model.pth", "config.json"
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
PARTIAL = ".partial"  # suffix of folders in which files are written
DAY = 24 * 3600
REMEMBERED_FROM = 1 << 20  # bytes: smaller files are read again
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
        what, fix = "a file cannot be written", "free some space, or choose another folder"
        refuse(path, seen, "a writable folder with enough free space", what, fix, CheckpointError)


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Return a file's hex SHA-256, from `cache_folder` if this version of the file was read before. A version is an
    inode, size and times, so bits that a disk changes by itself go unnoticed."""
    stat = path.stat()
    if stat.st_size < REMEMBERED_FROM:
        return sha256_of(path)
    version = "-".join(map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))
    found = ""
    with suppress(OSError, RuntimeError, CheckpointError):  # RuntimeError: a user without a home folder
        note = cache_folder() / "sha256" / version
        found = note.read_text(encoding="utf-8", errors="replace") if note.is_file() else ""
        if not re.fullmatch("[0-9a-f]{64}", found):
            found = sha256_of(path)
            write_text(note, found)
    return found or sha256_of(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder: {"files": {name: {"size": bytes, "sha256": hex}}, ...}, without files if missing.
    "generated" marks a file that a conversion made from a GGUF's metadata. "converted_from" is the recipe of the last
    conversion; its "published" lists the dtypes of the source's matrices. Raises CheckpointError."""
    path = folder / MANIFEST
    try:
        manifest = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {"files": {}}
        for name, entry in manifest["files"].items():
            if not entry.keys() >= {"size", "sha256"}:
                raise ValueError(f"{name} has no size or sha256")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        required = '{"files": {name: {"size": ..., "sha256": ...}}}'
        fix = f"delete {MANIFEST}, then run download.py and convert_hf_checkpoint.py --force again"
        refuse(path, repr(error), required, fix=fix, error=CheckpointError)
    return dict(manifest)


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return manifest entries of files by name: size in bytes and hex SHA-256."""
    paths = {name: folder / name for name in names}
    return {name: {"size": path.stat().st_size, "sha256": remembered_sha256(path)} for name, path in paths.items()}


def update_manifest(folder: Path, entries: dict[str, dict[str, Any]], **extra: Any) -> None:
    """Record `entries` and the `extra` keys, keeping the entries of other files that are still there."""
    manifest = read_manifest(folder)
    kept = {name: entry for name, entry in manifest["files"].items() if (folder / name).exists()}
    text = json.dumps({**manifest, **extra, "files": kept | entries}, indent=2)
    write_text(folder / MANIFEST, text + "\n")


def check_files(folder: Path, names: Iterable[str], *, verify: bool = False) -> None:
    """Compare sizes and SHA-256 of files with the manifest; files that it does not list pass. verify: read every file
    instead of using stored sums. Raises CheckpointError naming the file that is missing or differs."""
    entries = read_manifest(folder)["files"]
    for name in (name for name in names if name in entries):
        path, entry = folder / name, entries[name]
        seen: object = path.stat().st_size if path.is_file() else "no such file"
        required: object = entry["size"]
        if seen == required:
            required = entry["sha256"]
            # A stored sum that differs may be garbled: read the file.
            if verify or (seen := remembered_sha256(path)) != required:
                seen = sha256_of(path)
        if seen != required:
            what = "a file is not the one that the manifest describes"
            fix = "download or convert it again (--force, where it was changed on purpose)"
            refuse(path, seen, f"{required} ({MANIFEST})", what, fix, CheckpointError)


def downloaded_side_files(folder: Path) -> tuple[str, ...]:
    """Return the side files that came with a folder's weights, without files that a conversion generated."""
    generated = {name for name, entry in read_manifest(folder)["files"].items() if entry.get("generated")}
    return tuple(name for name in SIDE_FILES if name not in generated and (folder / name).is_file())
