"""Download checkpoints from the Hugging Face Hub: select files, resume, verify."""

import fnmatch
from collections.abc import Iterable
from pathlib import Path

import huggingface_hub

from common.errors import CheckpointError, flag, refuse, refuse_checkpoint
from models.checkpoints.manifest import SIDE_FILES, WEIGHTS, describe, read_manifest, sha256_of, update_manifest

WEIGHT_PATTERNS = ("model*.safetensors*", "pytorch_model*.bin*", "*.gguf")  # with indices; the first format is used


def download_repo(repo_id: str, out_dir: Path, *, gguf: str | None = None, token: str | None = None) -> None:
    """Fetch weights, config and tokenizer into `out_dir` and write its manifest.json. Safetensors are preferred to
    .bin, and both to GGUF; `gguf` names the file to fetch of several. Complete files are kept and partial files
    resumed. Raises CheckpointError if the repository cannot be read, a file arrives damaged, or `out_dir` has another
    checkpoint."""
    listed = read_manifest(out_dir)["files"].items()
    downloaded = {name for name, entry in listed if name != WEIGHTS and not entry.get("generated")}
    try:
        info = huggingface_hub.HfApi(token=token).model_info(repo_id, files_metadata=True)
        siblings = {sibling.rfilename: sibling for sibling in info.siblings or ()}
        names = select_files(siblings, gguf)
        foreign = sorted(downloaded.difference(names))
        ggufs = [name for name in names if name.endswith(".gguf")]
        if names and not foreign and len(ggufs) < 2:
            huggingface_hub.snapshot_download(
                repo_id, revision=info.sha, local_dir=out_dir, allow_patterns=names, token=token
            )
    except Exception as error:  # the Hub's HTTP library, and so the class of errors, differs between releases
        seen = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        required = "a repository that can be downloaded, and room on the disk"
        fix = "mend that (--repo_id, --hf_token, its licence on its Hub page) and run download.py again: it resumes"
        refuse_checkpoint(f"repository {repo_id}", seen, required, fix=fix)
    if gguf and not names:
        seen = ", ".join(sorted(name for name in siblings if name.endswith(".gguf"))) or "none"
        refuse("gguf", gguf, f"a .gguf file of {repo_id}: {seen}", "there is no such file", error=CheckpointError)
    if not names:
        required = "a repository with model*.safetensors, pytorch_model*.bin or *.gguf at its top level"
        refuse_checkpoint(f"repository {repo_id}", sorted(siblings)[:6], required, fix="choose another repository")
    if len(ggufs) > 1:
        seen, required = ", ".join(ggufs), "one of them"
        what, fix = f"{repo_id} has several .gguf files", f"name one with {flag('gguf')}"
        refuse("gguf", seen, required, what, fix, CheckpointError)
    if foreign:  # weights or a tokenizer of two checkpoints would be mixed
        seen, fix = f"{', '.join(foreign)}, which {repo_id} does not have", "choose another folder with --out_dir"
        refuse_checkpoint(out_dir, seen, "a folder without another checkpoint", fix=fix)
    for name in names:
        if (lfs := siblings[name].lfs) and lfs.sha256 != (found := sha256_of(out_dir / name)):
            fix = "delete that file and run download.py again"
            refuse_checkpoint(out_dir / name, found, lfs.sha256, fix=fix)
    update_manifest(out_dir, describe(out_dir, names))


def select_files(names: Iterable[str], gguf: str | None = None) -> list[str]:
    """Return the files to fetch: the first weight format present, or that GGUF, config and tokenizer; empty without
    weights."""
    top_level = sorted(name for name in names if "/" not in name)
    if gguf:
        return sorted({gguf, *SIDE_FILES}.intersection(top_level)) if gguf in top_level else []
    for pattern in WEIGHT_PATTERNS:
        if weights := fnmatch.filter(top_level, pattern):
            return sorted({*weights, *SIDE_FILES}.intersection(top_level))
    return []
