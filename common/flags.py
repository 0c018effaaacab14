"""The type of flags that may be left out, for every program and for configurations that are made from Python."""

from typing import Annotated, TypeVar

from tyro.conf import arg

Value = TypeVar("Value")
# An option that may be left out, whose help says the default.
Given = Annotated[Value | None, arg(help_behavior_hint="")]
