"""Texts in a terminal, with nothing that moves the cursor."""

from common.errors import flag
from engine.bench.config import RunConfig
from models.checkpoints.model_source import ModelSource, find_model

CONTROLS = dict.fromkeys((*range(32), *range(127, 160)), "") | {ord("\n"): "\n", ord("\t"): "    "}


def printable(text: str) -> str:
    """With spaces for tabs, and no other control characters: no model is to move a terminal's cursor."""
    return text.translate(CONTROLS)


def text_target(config: RunConfig) -> ModelSource:
    """The target, read from its files but not loaded. Errors: UserError if there is none, or it has no text."""
    own = config.target
    own.require_trained("random weights have nothing to say")
    return find_model(own.model, own.load_format, own.model_name, flag("model"), own.verify)
