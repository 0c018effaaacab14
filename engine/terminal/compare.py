"""foretoken.py compare: the same prompts decoded plainly and speculatively, live and side by side."""

from dataclasses import dataclass, field

from engine.bench.config import Output, Rows, Sizes, Text
from engine.terminal.models import ModelFlags


@dataclass(frozen=True, kw_only=True)
class Compare(ModelFlags):
    """the same prompts decoded plainly and speculatively, live and side by side"""

    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=Sizes)
    rows: Rows = field(default_factory=Rows)
    output: Output = field(default_factory=Output)

    def run(self) -> None:
        from engine.bench import passes
        from engine.bench.finish import finish
        from engine.bench.session import Session

        session = Session.open(self.config())
        finish("compare", session, passes.speculation_passes(session))
