"""Paths of the built-in default: SmolLM2-135M-Instruct and the text of *Pride and Prejudice*."""

from common.checkout import ROOT

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_CHECKPOINT = ROOT / "checkpoints" / DEFAULT_NAME
DEFAULT_BOOK = ROOT / "data" / "pride_and_prejudice.txt"
