"""Ctrl-C while a script still imports: the same word and exit code as later. Scripts import this before all else."""

from __future__ import annotations

import os
import sys
from types import TracebackType

INTERRUPTED_CODE = 130


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print("interrupted", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED_CODE)


sys.excepthook = _end
