"""Fetch a checkpoint from the Hugging Face Hub, or without --repo_id the built-in default model and book."""

from __future__ import annotations

import common.startup

from pathlib import Path

from engine.bench.arguments import Parser

from common.checkout import ROOT
from common.exit import exit_on_user_error
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from models.checkpoints.download_default import download_default
from models.checkpoints.download_hub import download_repo


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--repo_id", help="such as meta-llama/Meta-Llama-3.1-8B (default: the built-in model)")
    parser.add_argument("--hf_token", help="for gated repositories (default: the token of `hf auth login`)")
    parser.add_argument("--out_dir", type=Path, help="default: checkpoints/REPO_ID in this repository")
    args = parser.parse_args()
    if args.repo_id:
        out_dir = args.out_dir or ROOT / "checkpoints" / args.repo_id
        download_repo(args.repo_id, out_dir, token=args.hf_token)
    else:
        out_dir = args.out_dir or DEFAULT_CHECKPOINT
        download_default(out_dir)
    print(f"next: python convert_hf_checkpoint.py --checkpoint_dir {out_dir}")


if __name__ == "__main__":
    exit_on_user_error(main)
