"""Files written whole or not at all, and the manifest.json of sizes and SHA-256 sums beside them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kv_cache.errors import CheckpointError

MANIFEST = "manifest.json"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is flushed to disk and renamed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise CheckpointError(
            "a file cannot be written",
            where=str(path),
            seen=error,
            required="a writable folder with enough free space",
            fix="free some space, or choose another folder with --out_dir",
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, or an empty one if there is none.

    Returns {"files": {name: {"size": bytes, "sha256": hex}}, ...}. Raises CheckpointError if it is garbled.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        well_formed = all(entry.keys() >= {"size", "sha256"} for entry in manifest["files"].values())
    except (FileNotFoundError, NotADirectoryError):
        return {"files": {}}
    except (ValueError, TypeError, KeyError, AttributeError):
        well_formed = False
    if not well_formed:
        raise CheckpointError(
            "the manifest is damaged",
            where=str(path),
            seen="other content, or not JSON",
            required='{"files": {name: {"size": ..., "sha256": ...}}}',
            fix=f"delete {MANIFEST}, then run download.py and convert_hf_checkpoint.py --force again",
        )
    return dict(manifest)


def describe(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Manifest entries of files: their size in bytes and hex SHA-256, by name."""
    paths = {name: folder / name for name in names}
    return {name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for name, path in paths.items()}


def update_manifest(folder: Path, entries: dict[str, dict[str, Any]], **extra: Any) -> None:
    """Record `entries` and the `extra` keys, keeping the entries of other files that are still there."""
    manifest = read_manifest(folder)
    kept = {name: entry for name, entry in manifest["files"].items() if (folder / name).exists()}
    content = {**manifest, **extra, "files": kept | entries}
    write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def check_files(folder: Path, names: Iterable[str], *, verify: bool) -> None:
    """Compare files with the manifest: the size always, the SHA-256 if `verify`; unlisted names pass.

    Raises CheckpointError naming the file that is missing or differs.
    """
    entries = read_manifest(folder)["files"]
    for name in names:
        if name not in entries:
            continue
        path, entry = folder / name, entries[name]
        seen: object = path.stat().st_size if path.exists() else "no such file"
        required: object = entry["size"]
        if seen == required and verify:
            seen, required = sha256_of(path), entry["sha256"]
        if seen != required:
            raise CheckpointError(
                "a file is not the one that the manifest describes",
                where=str(path),
                seen=seen,
                required=f"{required} ({MANIFEST})",
                fix="download or convert it again; if you replaced the file on purpose, delete the manifest",
            )
