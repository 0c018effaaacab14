"""Drafters propose the tokens that the target verifies; each has a file here."""

from engine.drafters.base import Drafter, RowUpdate, check_drafts, check_gamma, check_most_drafts, wrong_drafts
from engine.drafters.text_drafter import Guess, HostDrafter, TextDrafter
