"""Texts in a terminal: the model's chat template around what is said to it, and nothing that moves the cursor."""

from collections.abc import Mapping, Sequence

from common.errors import ConfigError, flag
from engine.bench.config import RunConfig
from models.checkpoints.chat_template import chat_text
from models.checkpoints.model_source import ModelSource, find_model
from models.checkpoints.tokenizer import Tokenizer

CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Without control characters: no model is to move a terminal's cursor, or to change its title."""
    return text.translate(CONTROLS)


def text_target(config: RunConfig) -> ModelSource:
    """The target, read from its files but not loaded. Errors: UserError if there is none, or it has no text."""
    own = config.target
    source = find_model(own.model, own.load_format, own.model_name, flag("model"), own.verify)
    if not source.has_text:
        where = flag("load_format")
        raise ConfigError("random weights have nothing to say", where, "dummy", "a trained model", f"leave out {where}")
    return source


def chat_prompt(source: ModelSource, tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The token ids of a conversation that the model is to go on with. Errors: UserError without a chat template."""
    return tokenizer.encode(chat_text(source, messages), add_bos=False)
