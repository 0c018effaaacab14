"""Checkpoints of the Hugging Face Hub: what to fetch, resumed, verified, with one clear error per failure."""

from __future__ import annotations

import errno
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub

from common.errors import CheckpointError
from models.checkpoints.manifest import describe, read_manifest, update_manifest
from models.checkpoints.tokenizer import TOKENIZER_FILES

SIDE_PATTERNS = ("config.json", "generation_config.json", "tokenizer.*", "tokenizer_config.json")
WEIGHT_PATTERNS = (
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ("*.gguf",),
)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
FAILURES = {
    401: ("the Hub wants a token", "a valid token", "pass --hf_token, or check the repository's name"),
    403: ("the Hub refuses this token", "access to the repository", "accept its licence on its Hub page"),
    404: ("the Hub has no such repository", "owner/name of a model", "check --repo_id"),
}


def download_repo(repo_id: str, out_dir: Path, *, token: str | None = None) -> None:
    """Fetch weights, config and tokenizer into `out_dir` and write its manifest.json.

    Safetensors are preferred to .bin, and both to GGUF. Files already there are kept, partial ones resumed.
    Raises CheckpointError if the repository cannot be had, a file arrives damaged, or `out_dir` holds another one.
    """
    try:
        info = huggingface_hub.HfApi(token=token).model_info(repo_id, files_metadata=True)
        names = select_files(sibling.rfilename for sibling in info.siblings or ())
        _refuse_mixing(repo_id, out_dir, names)
        if names:
            huggingface_hub.snapshot_download(
                repo_id, revision=info.sha, local_dir=out_dir, allow_patterns=names, token=token
            )
    except CheckpointError:
        raise
    except Exception as error:  # its HTTP library, and so the class of its errors, differs between releases
        raise _explain(repo_id, error) from error
    if not names:
        raise CheckpointError(
            "the repository holds no weights",
            where=repo_id,
            seen=", ".join(sorted(sibling.rfilename for sibling in info.siblings or ())[:6]) or "no files",
            required="model*.safetensors, pytorch_model*.bin or *.gguf at its top level",
            fix="name a repository of model weights in Hugging Face layout",
        )
    entries = describe(out_dir, names)
    _compare(out_dir, entries, info.siblings or ())
    update_manifest(out_dir, entries)


def select_files(names: Iterable[str]) -> list[str]:
    """The files to fetch: the first weight format present, config and tokenizer; empty without weights."""
    top_level = sorted(name for name in names if "/" not in name)
    for patterns in WEIGHT_PATTERNS:
        if any(fnmatch.fnmatch(name, patterns[0]) for name in top_level):
            wanted = (*patterns, *SIDE_PATTERNS)
            return [name for name in top_level if any(fnmatch.fnmatch(name, pattern) for pattern in wanted)]
    return []


def _refuse_mixing(repo_id: str, out_dir: Path, names: Sequence[str]) -> None:
    """Weights or a tokenizer of another checkpoint would be taken for this one's."""
    listed = read_manifest(out_dir)["files"]
    patterns = [pattern for group in WEIGHT_PATTERNS for pattern in group] + ["config.json", *TOKENIZER_FILES]
    others = [
        name
        for name, entry in listed.items()
        if name not in names and not entry.get("generated") and any(fnmatch.fnmatch(name, p) for p in patterns)
    ]
    if names and others:
        raise CheckpointError(
            "the folder holds another checkpoint",
            where=str(out_dir),
            seen=f"{', '.join(others)}, which {repo_id} does not have",
            required="a folder of its own for each checkpoint",
            fix="choose another one with --out_dir",
        )


def _compare(out_dir: Path, entries: Mapping[str, Any], siblings: Sequence[Any]) -> None:
    """Check what arrived against the sizes and LFS hashes that the Hub states."""
    for sibling in siblings:
        if sibling.rfilename not in entries:
            continue
        entry = entries[sibling.rfilename]
        stated = sibling.lfs.sha256 if sibling.lfs else entry["sha256"]
        if sibling.size not in (None, entry["size"]) or stated != entry["sha256"]:
            raise CheckpointError(
                "a downloaded file is damaged",
                where=str(out_dir / sibling.rfilename),
                seen=f"{entry['size']} bytes, sha256 {entry['sha256']}",
                required=f"{sibling.size} bytes, sha256 {stated}",
                fix="delete that file and run download.py again",
            )


def _explain(repo_id: str, error: Exception) -> CheckpointError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    gated = type(error).__name__ == "GatedRepoError"
    if status in FAILURES:
        what, required, fix = FAILURES[403 if gated else status]
    elif isinstance(error, ValueError) and status is None:
        what, required, fix = FAILURES[404]
    elif isinstance(error, OSError) and error.errno in DISK_ERRORS:
        what, required = "the download cannot be written", "a writable folder with enough free space"
        fix = "free some space, or choose another --out_dir; a later run resumes"
    else:
        what, required, fix = (
            "the Hub cannot be reached",
            "a connection to the Hub",
            "check the network (and HF_ENDPOINT, HF_HUB_OFFLINE), then run download.py again: it resumes",
        )
    first_line = str(error).strip().splitlines()[:1] or [""]
    seen = f"{type(error).__name__}: {first_line[0]}" + (f" (HTTP {status})" if status else "")
    return CheckpointError(what, where=repo_id, seen=seen, required=required, fix=fix)
