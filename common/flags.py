"""Types of flags, which configurations share with programs; importing them changes nothing in a process."""

from typing import Annotated, TypeVar

from tyro.conf import arg

Value = TypeVar("Value")
# An option that may be left out, whose help says the default.
Given = Annotated[Value | None, arg(help_behavior_hint="")]
