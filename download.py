"""Fetch a checkpoint from the Hugging Face Hub, or without --repo_id the built-in default model and book."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from common import cli
from common.checkout import ROOT
from common.say import note_without_effect
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.checkpoints.download_default import download_default
from models.checkpoints.download_hub import download_repo


@dataclass(frozen=True)
class Flags:
    repo_id: Annotated[str | None, arg(help_behavior_hint="(default: the built-in model)")] = None
    """a repository such as meta-llama/Meta-Llama-3.1-8B"""
    gguf: Annotated[str | None, arg(help_behavior_hint="")] = None
    """the .gguf file to fetch, if the repository has several"""
    hf_token: Annotated[str | None, arg(help_behavior_hint="(default: the token of `hf auth login`)")] = None
    """access token for gated repositories"""
    out_dir: Annotated[Path | None, arg(help_behavior_hint="(default: checkpoints/REPO_ID in this repository)")] = None
    """folder of the checkpoint"""


def main(flags: Flags) -> None:
    if flags.repo_id is not None:
        out_dir = flags.out_dir or ROOT / "checkpoints" / flags.repo_id
        download_repo(flags.repo_id, out_dir, gguf=flags.gguf, token=flags.hf_token)
    else:
        if unused := [name for name in ("gguf", "hf_token") if getattr(flags, name) is not None]:
            note_without_effect(unused, "the built-in model is a single file for everybody")
        out_dir = flags.out_dir or DEFAULT_CHECKPOINT
        download_default(out_dir)
    if "MAKELEVEL" not in os.environ:  # make runs the next command itself
        print(f"next: python convert_hf_checkpoint.py --checkpoint_dir {out_dir}")


if __name__ == "__main__":
    cli.run(main, Flags)
