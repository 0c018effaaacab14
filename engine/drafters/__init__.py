"""Drafters: what proposes the tokens that the target verifies. One protocol, one file each."""

from engine.drafters.base import Drafter, check_gamma
from engine.drafters.ngram import NGram
from engine.drafters.saved_text import SavedText
from engine.drafters.self_speculation import SelfSpeculation

__all__ = ["Drafter", "NGram", "SavedText", "SelfSpeculation", "check_gamma"]
