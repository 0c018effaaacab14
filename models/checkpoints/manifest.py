"""Files written whole or not at all, and the manifest.json of sizes and SHA-256 sums beside them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from models.checkpoints.file_sums import remembered_sha256, sha256_of

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


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, or an empty one if there is none.

    Returns {"files": {name: {"size": bytes, "sha256": hex}}, "sha256": hex of all else, ...}. An entry with
    "generated" is of a file that a conversion made from a GGUF's metadata; "converted_from" holds the SHA-256 of
    the weights that the last one read. Raises CheckpointError if it is garbled.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        manifest = json.loads(text)
        well_formed = all(entry.keys() >= {"size", "sha256"} for entry in manifest["files"].values())
        well_formed &= isinstance(manifest.get("converted_from", {}).get("files", {}), dict)
        is_older = manifest.keys() <= {"files", "converted_from"}  # from before it had a sum of itself
        well_formed &= is_older or text == _text(manifest)
    except (FileNotFoundError, NotADirectoryError):
        return {"files": {}}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
    return {name: {"size": path.stat().st_size, "sha256": remembered_sha256(path)} for name, path in paths.items()}


def update_manifest(folder: Path, entries: dict[str, dict[str, Any]], **extra: Any) -> None:
    """Record `entries` and the `extra` keys, keeping the entries of other files that are still there."""
    manifest = read_manifest(folder)
    kept = {name: entry for name, entry in manifest["files"].items() if (folder / name).exists()}
    write_text(folder / MANIFEST, _text({**manifest, **extra, "files": kept | entries}))


def _text(manifest: dict[str, Any]) -> str:
    """What is written: with the sum of the rest."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    return json.dumps({**rest, "sha256": hashlib.sha256(json.dumps(rest).encode()).hexdigest()}, indent=2) + "\n"


def check_files(folder: Path, names: Iterable[str], *, verify: bool = False, sizes_only: bool = False) -> None:
    """Compare files with the manifest: size, and unless `sizes_only` SHA-256; names that it does not list pass.

    The sum of a large file is one that this machine remembers for this version of it (`remembered_sha256`);
    `verify` reads it again. Raises CheckpointError naming the file that is missing or differs.
    """
    entries = read_manifest(folder)["files"]
    for name in names:
        if name not in entries:
            continue
        path, entry = folder / name, entries[name]
        seen: object = path.stat().st_size if path.is_file() else "no such file"
        required: object = entry["size"]
        if seen == required and not sizes_only:
            required = entry["sha256"]
            # Only the file itself can convict it.
            if verify or (seen := remembered_sha256(path)) != required:
                seen = sha256_of(path)
        if seen != required:
            raise CheckpointError(
                "a file is not the one that the manifest describes",
                where=str(path),
                seen=seen,
                required=f"{required} ({MANIFEST})",
                fix="download or convert it again; what replaces it on purpose belongs in a folder of its own",
            )
