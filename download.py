"""Fetch a checkpoint from the Hugging Face Hub, or without --repo_id the built-in default model and book."""

import os
from dataclasses import dataclass
from pathlib import Path

from common import cli
from common.checkout import ROOT
from common.say import note_without_effect
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.checkpoints.download_default import download_default
from models.checkpoints.download_hub import download_repo


@dataclass(frozen=True)
class Flags:
    repo_id: str | None = None
    """such as meta-llama/Meta-Llama-3.1-8B (default: the built-in model)"""
    hf_token: str | None = None
    """for gated repositories (default: the token of `hf auth login`)"""
    out_dir: Path | None = None
    """folder of the checkpoint (default: checkpoints/REPO_ID in this repository)"""


def main(flags: Flags) -> None:
    if flags.repo_id is None and flags.hf_token is not None:
        note_without_effect(["hf_token"], "the built-in model needs no token")
    if flags.repo_id is not None:
        out_dir = flags.out_dir or ROOT / "checkpoints" / flags.repo_id
        download_repo(flags.repo_id, out_dir, token=flags.hf_token)
    else:
        out_dir = flags.out_dir or DEFAULT_CHECKPOINT
        download_default(out_dir)
    if "MAKELEVEL" not in os.environ:  # make goes on by itself
        print(f"next: python convert_hf_checkpoint.py --checkpoint_dir {out_dir}")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
