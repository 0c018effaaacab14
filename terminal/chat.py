"""foretoken.py chat: a conversation, and after each answer what speculation did."""

from dataclasses import dataclass

from terminal.conversation import converse
from terminal.models import ModelFlags


@dataclass(frozen=True, kw_only=True)
class Chat(ModelFlags):
    """a conversation with the model, and after each answer what speculation did"""

    system: str | None = None
    """what the conversation begins with, before the first message"""
    gen_len: int = 512
    """the most new tokens of an answer"""
    context: int = 4096
    """the most tokens of a conversation, if the model's context has as many"""

    def run(self) -> None:
        converse(self.config(), self.system, self.gen_len, self.context)
