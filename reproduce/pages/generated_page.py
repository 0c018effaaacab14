"""Pages that are made from records: written, or checked to be what the records say."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.bench.arguments import Parser

from common.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Of a script that makes a page. Errors: ConfigError unless there are records to read, and a place for the page."""

    results: Path
    page: Path
    check: bool = False

    def __post_init__(self) -> None:
        require_folder("results", self.results)
        if not self.page.parent.is_dir():
            raise ConfigError(
                "there is no folder for the page",
                where="--page",
                seen=self.page,
                required="a file in an existing folder",
                fix=f"create {self.page.parent}, or leave out --page",
            )
        if self.page.is_dir():
            raise ConfigError(
                "a folder is no page",
                where="--page",
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


def make_parser(description: str, results: Path, page: Path) -> argparse.ArgumentParser:
    """For the script that makes a page: by default `page`, from the records in `results`."""
    parser = Parser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    parser.add_argument("--results", type=Path, default=results, help="the folder with the records")
    parser.add_argument("--page", type=Path, default=page, help="the page to write")
    return parser


def require_folder(flag: str, folder: Path) -> None:
    """Of a folder to read. Errors: ConfigError: made without it, the page would say that nothing was measured."""
    if not folder.is_dir():
        raise ConfigError(
            "there is no such folder",
            where=f"--{flag}",
            seen=folder,
            required="an existing folder",
            fix=f"correct the path, or leave out --{flag}",
        )
