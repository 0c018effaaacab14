"""Drafters: what proposes the tokens that the target verifies. One protocol, one file each."""

from engine.drafters.base import Drafter, check_gamma
from engine.drafters.ngram import NGram
from engine.drafters.saved_text import SavedText
from engine.drafters.self_speculation import SelfSpeculation
from engine.drafters.standalone import StandaloneDraft

__all__ = ["Drafter", "NGram", "SavedText", "SelfSpeculation", "StandaloneDraft", "check_gamma"]
