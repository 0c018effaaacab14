"""Policies: which entries a draft's cache keeps. Each is a frozen dataclass of options in its own file here."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, ClassVar, Literal, TypeVar

import torch

from common.errors import UserError, refuse
from common.say import say
from kv_cache.base import Device, KVCache, KVShape, TrialShape

Kind = TypeVar("Kind", bound=type)


@dataclass(frozen=True)
class Policy(ABC):
    """Options of a policy, whose fields are its flags."""

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
        with errors_refused(self):
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
def errors_refused(policy: Policy) -> Iterator[None]:
    """Turn an error of a policy's code into ConfigError, which names the last line that ran in the policy's file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # whatever a user's file raises
        module, where = type(policy).__module__, name_of(type(policy))
        for frame, line in walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__") == module:
                where = f"{module}.{frame.f_code.co_qualname}, line {line}"
        seen, what = f"{type(error).__name__}: {error}", f"the policy {type(policy).__name__} fails in its trial"
        refuse(where, seen, "no error for any prompt, layer or head", what, "correct the policy (docs/extending.md)")


def described(value: object) -> str:
    """Return the dtype and shape of a tensor, for an error; of another value, what it is."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, torch.Tensor) else repr(value)[:80]


def name_of(code: Any) -> str:
    """Return the module and the name of a class or a method, for an error."""
    return f"{code.__module__}.{code.__qualname__}"


def policies() -> dict[str, type[Policy]]:
    """Return the policies of this folder by name."""
    return registered("kv_cache", Path(__file__).parent, Policy)


def registered(package: str, folder: Path, kind: Kind) -> dict[str, Kind]:
    """Import the files of a package's folder, but kernels, which need Triton; return the subclasses of `kind` that have
    a name, by name. A file that cannot be imported is named in a note, and left out. Errors: ConfigError if two have
    the same name."""
    for file in pkgutil.iter_modules([str(folder)]):
        if not file.name.startswith("triton_"):
            _import(f"{package}.{file.name}")
    found: dict[str, Kind] = {}
    waiting: list[Any] = [kind]
    while waiting:
        subclass = waiting.pop()
        waiting += subclass.__subclasses__()
        is_left_out = subclass.__module__ not in sys.modules  # its file failed after the class
        if is_left_out or "name" not in vars(subclass):
            continue
        if (other := found.setdefault(subclass.name, subclass)) is not subclass:
            where, others = map(name_of, (subclass, other))
            seen, what = f"name = {subclass.name!r}, as {others}", "two classes have the same name"
            refuse(where, seen, "a name that no other class has", what, "rename one of them, or remove its file")
    return dict(sorted(found.items()))


@cache
def _import(module: str) -> None:
    """Import a module, or note once why that fails."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a user's file raises
        path = f"{module.replace('.', '/')}.py"
        say(f"note: {path} is left out, since it cannot be imported: {type(error).__name__}: {error}")
