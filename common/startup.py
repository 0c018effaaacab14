"""What every program does first: Ctrl-C ends it quietly while it imports, and torch waits until it is used."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, TracebackType
from typing import Any

INTERRUPTED_CODE = 130


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print("interrupted", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED_CODE)


class _Unloaded(ModuleType):
    """Stands for a module that takes long to import, until something in it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))  # from now on as fast as the module itself
        return getattr(module, name)


def import_from_now_on() -> None:
    """Modules imported from now on get torch itself; those before, when they first use it."""
    if isinstance(sys.modules.get("torch"), _Unloaded):
        del sys.modules["torch"]


sys.excepthook = _end
# Which flags there are depends on policies and drafters, whose files import torch: --help must not wait for it.
sys.modules.setdefault("torch", _Unloaded("torch"))
