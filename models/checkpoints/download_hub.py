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
NOT_WRITTEN = (
    "the download cannot be written",
    "a writable folder with enough free space",
    "free some space, or choose another --out_dir; a later run resumes",
)
NOT_REACHED = (
    "the Hub cannot be reached",
    "a connection to the Hub",
    "check the network (and HF_ENDPOINT, HF_HUB_OFFLINE), then run download.py again: it resumes",
)


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
        seen = ", ".join(sorted(sibling.rfilename for sibling in info.siblings or ())[:6]) or "no files"
        required = "model*.safetensors, pytorch_model*.bin or *.gguf at its top level"
        fix = "name a repository of model weights in Hugging Face layout"
        raise CheckpointError("the repository holds no weights", repo_id, seen, required, fix)
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
    patterns = [pattern for group in WEIGHT_PATTERNS for pattern in group] + ["config.json", *TOKENIZER_FILES]
    others = [
        name
        for name, entry in read_manifest(out_dir)["files"].items()
        if name not in names and not entry.get("generated") and any(fnmatch.fnmatch(name, p) for p in patterns)
    ]
    if names and others:
        seen, required = (
            f"{', '.join(others)}, which {repo_id} does not have",
            "a folder of its own for each checkpoint",
        )
        fix = "choose another one with --out_dir"
        raise CheckpointError("the folder holds another checkpoint", out_dir, seen, required, fix)


def _compare(out_dir: Path, entries: Mapping[str, Any], siblings: Sequence[Any]) -> None:
    """Check what arrived against the sizes and LFS hashes that the Hub states."""
    for sibling in siblings:
        if sibling.rfilename not in entries:
            continue
        size, sha256 = (entries[sibling.rfilename][key] for key in ("size", "sha256"))
        stated = sibling.lfs.sha256 if sibling.lfs else sha256
        if sibling.size not in (None, size) or stated != sha256:
            seen, required = f"{size} bytes, sha256 {sha256}", f"{sibling.size} bytes, sha256 {stated}"
            path, fix = out_dir / sibling.rfilename, "delete that file and run download.py again"
            raise CheckpointError("a downloaded file is damaged", path, seen, required, fix)


def _explain(repo_id: str, error: Exception) -> CheckpointError:
    kind, status = type(error).__name__, getattr(getattr(error, "response", None), "status_code", 0)
    if kind == "GatedRepoError":
        failure = FAILURES[403]
    elif isinstance(error, ValueError) and not status:
        failure = FAILURES[404]
    elif isinstance(error, OSError) and error.errno in DISK_ERRORS:
        failure = NOT_WRITTEN
    else:
        failure = FAILURES.get(status, NOT_REACHED)
    seen = f"{kind}: {str(error).strip().partition(chr(10))[0]}" + (f" (HTTP {status})" if status else "")
    what, required, fix = failure
    return CheckpointError(what, repo_id, seen, required, fix)
