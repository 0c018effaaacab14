"""Plug-ins: the policies and drafts in the files of their packages, and in files of a user's own folder."""

import importlib
import os
import pkgutil
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from inspect import isabstract
from traceback import walk_tb
from typing import Any, TypeVar

from common.errors import ConfigError, UserError, refuse

Kind = TypeVar("Kind", bound=type)
# The packages whose files are policies and drafts.
PACKAGES = "kv_cache", "engine.drafters"
# The variable that names a folder with folders like the packages', such as `kv_cache/` with policies.
FOLDER = "FORETOKEN_PLUGINS"


def registered(package: str, kind: Kind) -> dict[str, Kind]:
    """Import a package's files; return the direct and indirect subclasses of `kind` that have a name, by that name:
    the attribute that `kind.KEY` names. Errors: ConfigError for two of a name, for a class of the package that has none
    although nothing derives from it, and for one that is no dataclass."""
    import_files(package)
    found: dict[str, Kind] = {}
    waiting: list[Any] = [kind]
    while waiting:
        subclass = waiting.pop()
        waiting += (derived := subclass.__subclasses__())
        has_failed = subclass.__module__ not in sys.modules  # its file, after the class
        if has_failed or subclass.KEY != kind.KEY:  # type: ignore[attr-defined]
            continue
        where, name = name_of(subclass), vars(subclass).get(subclass.KEY)
        if name is None:
            if not (derived or isabstract(subclass)) and subclass.__module__.startswith(f"{package}."):
                required = f'{subclass.KEY}: ClassVar[str] = "..."'
                refuse(where, f"no {subclass.KEY}", required, "no flag can name a class", "add that line to the class")
            continue
        if "__dataclass_fields__" not in vars(subclass):
            what, required = "a class cannot have options", "@dataclass(frozen=True)"
            refuse(where, "no dataclass", required, what, "write that line above the class")
        if (other := found.setdefault(name, subclass)) is not subclass:
            seen, what = f"{subclass.KEY} = {name!r}, as {name_of(other)}", "two classes have the same name"
            refuse(where, seen, "a name that no other class has", what, "rename one of them, or remove its file")
    return dict(sorted(found.items()))


def import_files(*packages: str) -> list[str]:
    """Import the files of packages, and of the folders of these names in $FORETOKEN_PLUGINS. Return the file and the
    error of each that cannot be imported. Kernels, files named triton_*, are left out. Errors: ConfigError if that
    folder has no such folders, or a file with the name of a file of the package."""
    modules: list[str] = []
    for package in packages:
        path, own = sys.modules[package].__path__, _own_folder(package)
        path += [own] if own and own not in path else []
        modules += (f"{package}.{file.name}" for file in pkgutil.iter_modules(path) if file.name[:7] != "triton_")
    return [why for module in modules if (why := _why_not(module))]


@cache
def _own_folder(package: str) -> str:
    """Return the folder of a user's files that belong to a package, or an empty text."""
    if not (root := os.environ.get(FOLDER)):
        return ""
    if not any(os.path.isdir(os.path.join(root, *name.split("."))) for name in PACKAGES):
        what, required = "there are no plug-ins", "a folder with kv_cache/ or engine/drafters/"
        refuse(f"${FOLDER}", root, required, what, "name the folder that these are in")
    folder = os.path.join(root, *package.split("."))
    theirs, ours = (
        {file.name for file in pkgutil.iter_modules(path)} for path in ([folder], sys.modules[package].__path__)
    )
    for name in sorted(theirs & ours):
        what, required = "a plug-in has the name of another file", f"a name that {package} does not have"
        refuse(os.path.join(folder, f"{name}.py"), name, required, what, "rename it")
    return folder


@cache
def _why_not(module: str) -> str:
    """Import a module; return its file and the error if that fails, or else an empty text."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's file raises
        spec = find_spec(module)
        where = last_line(error, {module}) or os.path.relpath((spec and spec.origin) or module)
        return f"{where}: {type(error).__name__}: {error}"
    return ""


@contextmanager
def errors_refused(*kinds: type) -> Iterator[None]:
    """Turn an error of the code of these kinds' files into ConfigError, which names the last line there. Errors that
    the project's models and kernels raise for them stay as they are."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a user's file raises
        if not (where := last_line(error, {kind.__module__ for kind in kinds})):
            raise
        seen, what = f"{type(error).__name__}: {error}", "code of a policy or a draft fails before the run"
        fix = "correct that line, or the option that it reads (docs/extending.md)"
        raise ConfigError(what, where, seen, "no error for any option, prompt, layer or head", fix) from error


def last_line(error: Exception, modules: Container[str]) -> str:
    """Return the file and number of the last line of these modules that an error passed through; an empty text if there
    is none, or if it went on to the package `models`."""
    where = ""
    for frame, line in walk_tb(error.__traceback__):
        name = frame.f_globals.get("__name__", "")
        if name in modules:
            where = f"{os.path.relpath(frame.f_code.co_filename)}, line {line}"
        elif name.startswith("models."):
            where = ""
    return where


def name_of(code: Any) -> str:
    """Return the file and the name of a class or a method, for an error."""
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    return f"{os.path.relpath(file) if file else code.__module__}, {code.__qualname__}"
