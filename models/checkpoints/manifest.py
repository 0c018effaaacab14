"""The manifest.json of a checkpoint's folder: sizes and SHA-256 sums of its files, and what a conversion made."""

import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common.errors import CheckpointError
from models.checkpoints.tokenizer import TOKENIZER_FILES
from models.cpp_build import cache_folder

MANIFEST, WEIGHTS, CONFIG = "manifest.json", "model.pth", "config.json"
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS, GENERATION = "special_tokens_map.json", "generation_config.json"
PARTIAL = ".partial"  # ends the names of folders in which files are written
REMEMBERED_FROM = 1 << 20  # bytes; what is smaller is as quickly read again
SIDE_FILES = (CONFIG, *TOKENIZER_FILES, TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_TOKENS, GENERATION)
# Of the weights of a download, by their formats: how their files are named, and then those that list them.
WEIGHT_PATTERNS = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ("*.gguf",),
)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path of that name in a new folder beside it; on success what is there is flushed and moved. Such folders
    of writers of this machine that were killed are removed, those of writers at work are not. Errors: CheckpointError.
    """
    own = f".{path.name}.{platform.node()}."  # what another machine has locked may seem free here
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{glob.escape(own)}*{PARTIAL}"):
            with suppress(OSError), _locked(left):
                shutil.rmtree(left)
        with ExitStack() as held:
            while True:
                made = TemporaryDirectory(PARTIAL, own, path.parent, ignore_cleanup_errors=True)
                partial = Path(held.enter_context(made), path.name)
                try:
                    held.enter_context(_locked(partial.parent))
                except (BlockingIOError, FileNotFoundError):  # removed as left over before it was locked
                    continue
                except OSError:  # a file system without locks, on which this machine cannot remove it either
                    pass
                break
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # RuntimeError: torch, of a full disk
        seen = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        required, fix = "a writable folder with enough free space", "free some space, or choose another folder"
        raise CheckpointError("a file cannot be written", path, seen, required, fix) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else holds the folder until this ends, or the process. Raises OSError: somebody does, or removed it."""
    name = folder / ".lock"  # NFS locks for all machines only files that are open for writing
    with name.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock.fileno()), name.stat()):
            raise FileNotFoundError
        yield


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, from the cache folder (of `cpp_build`) if this version of it was read before; what a disk
    changes by itself is no other version."""
    stat = path.stat()
    if stat.st_size < REMEMBERED_FROM:
        return sha256_of(path)
    version = "-".join(map(str, (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)))
    with suppress(OSError, RuntimeError, UnicodeDecodeError):  # RuntimeError: a user without a home folder
        known = (cache_folder() / "sha256" / version).read_text(encoding="utf-8")
        if re.fullmatch("[0-9a-f]{64}", known):
            return known
    seen = sha256_of(path)
    with suppress(OSError, RuntimeError):
        note = cache_folder() / "sha256" / version
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(seen, encoding="utf-8")
    return seen


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`: {"files": {name: {"size": bytes, "sha256": hex}}, ...}; no files if there is none.
    "generated": made from a GGUF's metadata by a conversion; "converted_from": the recipe of the last one, whose
    "published" names what the source has its matrices in. Raises CheckpointError if it is garbled."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"files": {}}
        well_formed = all(entry.keys() >= {"size", "sha256"} for entry in manifest["files"].values())
        well_formed &= all(isinstance(one, str) for one in manifest.get("converted_from", {}).get("published", ()))
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
    text = json.dumps({**manifest, **extra, "files": kept | entries}, indent=2)
    write_text(folder / MANIFEST, text + "\n")


def check_files(folder: Path, names: Iterable[str], *, verify: bool = False) -> None:
    """Compare the sizes and SHA-256 of files with the manifest; names that it does not list pass. verify: sums are read
    anew, remembered or not. Raises CheckpointError naming the file that is missing or differs."""
    entries = read_manifest(folder)["files"]
    for name in (name for name in names if name in entries):
        path, entry = folder / name, entries[name]
        seen: object = path.stat().st_size if path.is_file() else "no such file"
        required: object = entry["size"]
        if seen == required:
            required = entry["sha256"]
            # Only the file itself can convict it.
            if verify or (seen := remembered_sha256(path)) != required:
                seen = sha256_of(path)
        if seen != required:
            what = "a file is not the one that the manifest describes"
            fix = "download or convert it again (--force, where it was changed on purpose)"
            raise CheckpointError(what, path, seen, f"{required} ({MANIFEST})", fix)


def own_side_files(folder: Path) -> tuple[str, ...]:
    """The side files that came with a folder's weights: not those that an earlier conversion generated."""
    listed = read_manifest(folder)["files"]
    there = (name for name in SIDE_FILES if (folder / name).is_file())
    return tuple(name for name in there if not listed.get(name, {}).get("generated"))
