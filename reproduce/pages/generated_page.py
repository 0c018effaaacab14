"""Pages that are made from records: written, or checked to be what the records say."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError, flag


@dataclass(frozen=True)
class Options:
    """Of a script that makes a page. Errors: ConfigError unless there are records to read, and a place for the page."""

    results: Path
    """the folder with the records"""
    page: Path
    """the page to write"""
    check: bool = False
    """write nothing; exit code 1 if the page is stale"""

    def __post_init__(self) -> None:
        require_folder("results", self.results)
        if not self.page.parent.is_dir():
            raise ConfigError(
                "there is no folder for the page",
                where=flag("page"),
                seen=self.page,
                required="a file in an existing folder",
                fix=f"create {self.page.parent}, or leave out {flag('page')}",
            )
        if self.page.is_dir():
            raise ConfigError(
                "a folder is no page",
                where=flag("page"),
                seen=self.page,
                required="a file",
                fix="name a file in that folder",
            )

    def write_or_check(self, wanted: str, script: str) -> None:
        """Write the page, or exit with code 1 if it is not the wanted text; `script` is what makes it."""
        if not self.check:
            self.page.write_text(wanted, encoding="utf-8")
            print(f"wrote {self.page}")
        elif not self.page.is_file() or self.page.read_text(encoding="utf-8") != wanted:
            print(f"{self.page} is not what its records say: python {script}", file=sys.stderr)
            sys.exit(1)


def require_folder(name: str, folder: Path) -> None:
    """Of a folder to read. Errors: ConfigError: made without it, the page would say that nothing was measured."""
    if not folder.is_dir():
        raise ConfigError(
            "there is no such folder",
            where=flag(name),
            seen=folder,
            required="an existing folder",
            fix=f"correct the path, or leave out {flag(name)}",
        )
