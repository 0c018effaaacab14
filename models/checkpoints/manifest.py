"""The manifest.json of a checkpoint's folder: SHA-256 sums of its files, and which of them belong to which weights."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.cpp_build import cache_folder

MANIFEST, WEIGHTS, CONFIG = "manifest.json", "model.pth", "config.json"
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS, GENERATION = "special_tokens_map.json", "generation_config.json"
SIDE_FILES = (CONFIG, *TOKENIZER_FILES, TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_TOKENS, GENERATION)
REMEMBERED_FROM = 1 << 20  # bytes; what is smaller is as quickly read again


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on success it is flushed and renamed. Errors: CheckpointError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        required = "a writable folder with enough free space"
        fix = "free some space, or choose another folder with --out_dir"
        raise CheckpointError("a file cannot be written", path, error, required, fix) from None
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


def remembered_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, from the cache folder (of `cpp_build`) if this version of the file (`version_of`: what any
    program writes is another one, what a disk changes by itself is not) was read before."""
    version = version_of(path)
    if path.stat().st_size < REMEMBERED_FROM:
        return sha256_of(path)
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: a user without a home folder
        known = (cache_folder() / "sha256" / version).read_text(encoding="utf-8")
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    seen = sha256_of(path)
    if version_of(path) == version:
        with suppress(OSError, RuntimeError):
            note = cache_folder() / "sha256" / version
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(seen, encoding="utf-8")
    return seen


def version_of(path: Path) -> str:
    """What tells one version of a file from another: where it is, its size, when its content and inode changed."""
    stat = path.stat()
    return "-".join(map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`: {"files": {name: {"size": bytes, "sha256": hex}}, "sha256": hex of all else, ...}; no
    files if there is none. "generated": made from a GGUF's metadata by a conversion; "converted_from": the recipe of
    the last one. Raises CheckpointError if it is garbled."""
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
        seen, required = "other content, or not JSON", '{"files": {name: {"size": ..., "sha256": ...}}}'
        fix = f"delete {MANIFEST}, then run download.py and convert_hf_checkpoint.py --force again"
        raise CheckpointError("the manifest is damaged", path, seen, required, fix)
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
    """Compare files with the manifest: size, and unless `sizes_only` SHA-256 (`remembered_sha256`, with `verify` read
    anew); names that it does not list pass. Raises CheckpointError naming the file that is missing or differs."""
    entries = read_manifest(folder)["files"]
    for name in (name for name in names if name in entries):
        path, entry = folder / name, entries[name]
        seen: object = path.stat().st_size if path.is_file() else "no such file"
        required: object = entry["size"]
        if seen == required and not sizes_only:
            required = entry["sha256"]
            # Only the file itself can convict it.
            if verify or (seen := remembered_sha256(path)) != required:
                seen = sha256_of(path)
        if seen != required:
            what = "a file is not the one that the manifest describes"
            fix = "download or convert it again; what replaces it on purpose belongs in a folder of its own"
            raise CheckpointError(what, path, seen, f"{required} ({MANIFEST})", fix)


def own_side_files(folder: Path, weights: Sequence[Path], are_theirs: bool = False) -> tuple[str, ...]:
    """The side files that are there for `weights`, all in `folder`: not those that an earlier conversion generated.
    are_theirs: they belong to these weights, whatever was converted before. Raises CheckpointError where files are not
    what the manifest describes, or where it describes side files together with other weights."""
    manifest = read_manifest(folder)
    listed, converted = manifest["files"], manifest.get("converted_from", {}).get("files", {})
    generated = {name for name in SIDE_FILES if listed.get(name, {}).get("generated")}
    gone = {name for name in generated if not (folder / name).is_file()}
    indices = [name for name in listed if name.endswith(".index.json")]
    checked = generated - gone if are_theirs else set(SIDE_FILES) - gone
    check_files(folder, [*(path.name for path in weights), *indices, *sorted(checked)])

    others = {name for name in SIDE_FILES if name in listed} - generated
    known = [path.name in listed or remembered_sha256(path) in converted.values() for path in weights]
    # Only a GGUF has what it takes to generate them again; beside other weights they are left from a GGUF.
    foreign = (set() if all(known) else others) | (set() if weights[0].suffix == ".gguf" else generated - gone)
    if foreign and not are_theirs:
        what = "the weights were put beside files of another checkpoint"
        seen = f"{weights[0].name} with the {' and '.join(sorted(foreign))} of other weights"
        fix = "move the weights, with the files that belong to them, into a folder of their own; or add --force if "
        fix += "the files that are here do"
        raise CheckpointError(what, folder, seen, "weights with their own config.json and tokenizer", fix)
    return tuple(name for name in SIDE_FILES if (folder / name).is_file() and name not in generated)
