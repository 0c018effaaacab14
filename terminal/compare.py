"""foretoken.py compare: the same prompts decoded plainly and speculatively, live and side by side."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from tyro.conf import arg

from bench.config import ComparedSampling, Output, Rows, Sizes, Text
from common.flags import Common
from terminal.comparison import compare
from terminal.models import ModelFlags

SOME: Any = arg(help_behavior_hint="(default: a few; with --prefix_len or --dataset stretches of a text)")


@dataclass(frozen=True)
class Questions(Rows):
    """Which prompts, and where rows end."""

    prompts: Common[Annotated[str | None, SOME]] = None
    """one's own, asked in the model's chat template if it has one: a file or folder as the benchmarks take"""


@dataclass(frozen=True, kw_only=True)
class Compare(ModelFlags):
    """the same prompts decoded plainly and speculatively, live and side by side"""

    sampling: ComparedSampling = field(default_factory=ComparedSampling)
    text: Text = field(default_factory=Text)
    sizes: Sizes = field(default_factory=lambda: Sizes(gen_len=128))
    rows: Questions = field(default_factory=Questions)
    output: Output = field(default_factory=Output)
    save: Annotated[str | None, arg(help_behavior_hint="(default: none)")] = None
    """write both texts of every row to this file, as a page for a browser"""

    def run(self) -> None:
        compare(self.config(), self.save)
