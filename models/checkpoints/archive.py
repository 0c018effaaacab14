"""The zip archives that torch.save writes, compared with the check sums in them: torch.load does not look."""

from __future__ import annotations

import zipfile
from pathlib import Path

END, END_BYTES = b"PK\x05\x06", 22  # how the record begins that closes a zip archive, and its size without a comment


def check_archive(path: Path) -> None:
    """Read every record of a zip archive. Raises ValueError or zipfile.BadZipFile for one that is damaged.

    What is no archive passes: it may be of torch's older format. So does one that was saved without check sums.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        if any(record.CRC for record in archive.infolist()) and (damaged := archive.testzip()):
            raise ValueError(f"{damaged} is damaged")
    with path.open("rb") as file:
        file.seek(-END_BYTES, 2)
        if not file.read().startswith(END):
            raise ValueError("bytes follow the archive")
