"""Policies: which entries a draft's cache keeps. Each is a frozen dataclass of options in its own file here."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from inspect import isabstract
from traceback import walk_tb
from typing import Any, ClassVar, Literal, TypeVar

import torch

from common.errors import ConfigError, UserError, refuse
from kv_cache.base import Device, KVCache, KVShape, TrialShape

Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True)
class Policy(ABC):
    """Options of a policy, whose fields are its flags."""

    KEY: ClassVar[str] = "name"
    name: ClassVar[str]
    # True if entries are selected by the target's verifications, so that only self-drafts can use the policy.
    of_self_drafts: ClassVar[bool] = False
    # True if its cache selects a prompt's entries by their content.
    selects: ClassVar[bool] = False

    @abstractmethod
    def entries(self, length: int) -> int:
        """Return the number of KV entries of a row that grows to `length` tokens."""

    @abstractmethod
    def new_cache(self, config: KVShape, max_batch: int, length: int, device: Device, dtype: torch.dtype) -> KVCache:
        """Return an empty cache for rows of up to `length` tokens."""

    @property
    def room(self) -> int:
        """The most tokens of a round that the cache can hold next to entries that always stay."""
        return sys.maxsize

    @property
    def automatic(self) -> bool:
        """True if the number of entries is chosen while decoding."""
        return False

    @property
    def in_cache_positions(self) -> bool:
        """True if keys are rotated as they are read, by their slot."""
        return False

    def check(self) -> None:
        """Raise ConfigError if its cache cannot be made. Not for `auto` entries."""
        self.new_cache(TrialShape(), 1, 1, "meta", torch.float32)

    def alternatives(self, prefix_len: int) -> list[Policy]:
        """Return the policies that `auto` chooses among for prompts of `prefix_len` tokens; this policy without it."""
        return [self]

    def within(self, n_entries: int, n_block: int) -> Policy:
        """Return this policy with at most `n_entries` entries a row, but room for a block of `n_block` tokens, if it
        has a fixed budget that is larger; else this policy."""
        return self

    def for_context(self, trained: int, length: int) -> Policy:
        """Return this policy for a draft model trained on `trained` positions, in rows of up to `length` tokens."""
        return self


@dataclass(frozen=True)
class BudgetedPolicy(Policy):
    """A policy whose cache holds a fixed number of entries a row, whatever the length of the text."""

    draft_budget: int | Literal["auto"] = 512
    """KV entries per row: sinks or selected entries, and recent ones; -1 is --draft_policy full; auto, for self-drafts:
    whichever of 64, 128, 256, 512 and 1024 pays best, chosen while decoding"""

    AUTO_BUDGETS: ClassVar[tuple[int, ...]] = (64, 128, 256, 512, 1024)

    @property
    def reserved(self) -> int:
        """The number of entries that always stay, such as sinks; `auto` tries budgets of more than twice that."""
        return 0

    @property
    def automatic(self) -> bool:
        return self.draft_budget == "auto"

    def within(self, n_entries: int, n_block: int) -> Policy:
        least = max(n_entries, self.reserved + n_block)
        return self if self.automatic or least >= self.budget else replace(self, draft_budget=least)

    @property
    def budget(self) -> int:
        """The budget, once `auto` is resolved."""
        assert not isinstance(self.draft_budget, str), "auto is resolved by alternatives()"
        return self.draft_budget

    def alternatives(self, prefix_len: int) -> list[Policy]:
        if not self.automatic:
            return [self]
        fitting = [budget for budget in self.AUTO_BUDGETS if 2 * self.reserved < budget < prefix_len]
        return [replace(self, draft_budget=budget) for budget in fitting or self.AUTO_BUDGETS[:1]]

    def entries(self, length: int) -> int:
        return self.budget


@contextmanager
def errors_refused(*kinds: type) -> Iterator[None]:
    """Turn an error that passed through a file of these kinds into ConfigError, which names the last line there."""
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
    """Return the file and number of the last line of these modules that an error passed through; "" if none did."""
    where = ""
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") in modules:
            where = f"{os.path.relpath(frame.f_code.co_filename)}, line {line}"
    return where


def described(value: object) -> str:
    """Return the type of a value, with the dtype and shape of a tensor or an array, or the length of a list."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__}, {value.dtype} {[*value.shape]}"
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, Sized) else "")


def name_of(code: Any) -> str:
    """Return the file and the name of a class or a method, for an error."""
    return f"{code.__module__.replace('.', '/')}.py, {code.__qualname__}"


def policies() -> dict[str, type[Policy]]:
    """Return the policies of this folder by name."""
    return registered("kv_cache", Policy)


def registered(package: str, kind: Kind) -> dict[str, Kind]:
    """Import a package's files; return the subclasses of `kind`, also indirect ones, by what `kind.KEY` names in them,
    but bases, which lack it. Errors: ConfigError if two have the same name, or one has none or is no dataclass."""
    left_out(package)
    found: dict[str, Kind] = {}
    waiting: list[Any] = [kind]
    while waiting:
        subclass = waiting.pop()
        waiting += (derived := subclass.__subclasses__())
        is_left_out = subclass.__module__ not in sys.modules  # its file failed after the class
        if is_left_out or subclass.KEY != kind.KEY:  # type: ignore[attr-defined]
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


def left_out(*packages: str) -> list[str]:
    """Import the files of packages, and of $FORETOKEN_PLUGINS/kv_cache or engine/drafters, but kernels, which need
    Triton. Return why others cannot be imported."""
    modules: list[str] = []
    for package in packages:
        path = sys.modules[package].__path__
        more = os.path.join(os.environ.get("FORETOKEN_PLUGINS", ""), *package.split("."))
        path += [more] if "FORETOKEN_PLUGINS" in os.environ and more not in path else []
        modules += (f"{package}.{file.name}" for file in pkgutil.iter_modules(path) if file.name[:7] != "triton_")
    return [why for module in modules if (why := _why_not(module))]


@cache
def _why_not(module: str) -> str:
    """Import a module; return why that fails, or an empty text."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's file raises
        where = last_line(error, {module}) or f"{module.replace('.', '/')}.py"
        return f"{where}, which cannot be imported: {type(error).__name__}: {error}"
    return ""
