"""Checkpoints of the Hugging Face Hub: what to fetch, resumed, verified, with one clear error per failure."""

import errno
import fnmatch
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.utils import filter_repo_objects

from common.errors import CheckpointError
from models.checkpoints.manifest import describe, read_manifest, update_manifest
from models.checkpoints.tokenizer import TOKENIZER_FILES

SIDE_PATTERNS = ("config.json", "generation_config.json", "tokenizer.*", "tokenizer_config.json", "chat_template.jinja")
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
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        names = select_files(siblings)
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
        what, seen = "the repository holds no weights", ", ".join(sorted(siblings)[:6]) or "no files"
        required = "model*.safetensors, pytorch_model*.bin or *.gguf at its top level"
        fix = "name a repository of model weights in Hugging Face layout"
        raise CheckpointError(what, repo_id, seen, required, fix)
    entries = describe(out_dir, names)
    for name, entry in entries.items():
        stated, size, sha256 = siblings[name], entry["size"], entry["sha256"]
        stated_sha256 = stated.lfs.sha256 if stated.lfs else sha256
        if stated.size not in (None, size) or stated_sha256 != sha256:
            seen, required = f"{size} bytes, sha256 {sha256}", f"{stated.size} bytes, sha256 {stated_sha256}"
            what, fix = "a downloaded file is damaged", "delete that file and run download.py again"
            raise CheckpointError(what, out_dir / name, seen, required, fix)
    update_manifest(out_dir, entries)


def select_files(names: Iterable[str]) -> list[str]:
    """The files to fetch: the first weight format present, config and tokenizer; empty without weights."""
    top_level = sorted(name for name in names if "/" not in name)
    for patterns in WEIGHT_PATTERNS:
        if fnmatch.filter(top_level, patterns[0]):
            return list(filter_repo_objects(top_level, allow_patterns=[*patterns, *SIDE_PATTERNS]))
    return []


def _refuse_mixing(repo_id: str, out_dir: Path, names: Sequence[str]) -> None:
    """Weights or a tokenizer of another checkpoint would be taken for this one's."""
    patterns = [*itertools.chain(*WEIGHT_PATTERNS), "config.json", *TOKENIZER_FILES]
    listed = read_manifest(out_dir)["files"].items()
    others = [name for name, entry in listed if name not in names and not entry.get("generated")]
    others = list(filter_repo_objects(others, allow_patterns=patterns))
    if names and others:
        what, seen = "the folder holds another checkpoint", f"{', '.join(others)}, which {repo_id} does not have"
        required, fix = "a folder of its own for each checkpoint", "choose another one with --out_dir"
        raise CheckpointError(what, out_dir, seen, required, fix)


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
