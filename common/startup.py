"""What every program does first: Ctrl-C ends it quietly while it imports, and torch waits until it is used."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

INTERRUPTED_CODE = 130


def _end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, ModuleNotFoundError) and "tyro" not in sys.modules:  # which every program imports
        print(f"error: the package {error.name} is not installed\n  where:    {sys.executable}", file=sys.stderr)
        print("  fix:      . .venv/bin/activate, or make the environment: make demo", file=sys.stderr, flush=True)
        sys.exit(2)
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    if os.environ.get("RANK", "0") == "0":  # of several processes one speaks
        print("interrupted", file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED_CODE)


class _Unloaded(ModuleType):
    """Stands for torch until something in it is asked for."""

    def __getattr__(self, name: str) -> Any:
        import_from_now_on()
        module = importlib.import_module("torch")
        self.__dict__.update(vars(module))  # from now on as fast as the module itself
        return getattr(module, name)


class _Loaded(MetaPathFinder, Loader):
    """For `import torch.nn` as what first asks for torch: that loads both, and Python would load torch.nn again."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.startswith("torch.") and name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        self._own_spec = sys.modules[spec.name].__spec__
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec


def import_from_now_on() -> None:
    """Modules imported from now on get torch itself; those before, when they first use it."""
    if isinstance(sys.modules.get("torch"), _Unloaded):
        del sys.modules["torch"]


sys.excepthook = _end
# Which flags there are depends on policies and drafters, whose files import torch: --help must not wait for it.
if "torch" not in sys.modules:
    sys.modules["torch"] = _Unloaded("torch")
    sys.meta_path.insert(0, _Loaded())
