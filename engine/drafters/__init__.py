"""Drafters: what proposes the tokens that the target verifies. One protocol, one file each."""

from engine.drafters.base import Drafter, RowUpdate, check_gamma
from engine.drafters.text_drafter import Guess, HostDrafter, TextDrafter
