"""The checkout's packages win over namesakes, from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("common", "kv_cache", "models", "engine")
SURFACE = """
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""
SCRIPTS = (
    "tests/selfspec_benchmark.py",
    "tests/baseline_benchmark.py",
    "tests/longspec_benchmark.py",
    "download.py",
    "convert_hf_checkpoint.py",
)


@pytest.fixture(scope="module")
def decoys(tmp_path_factory) -> Path:
    """A folder that stands for a site-packages with unrelated packages of the same names."""
    folder = tmp_path_factory.mktemp("site-packages")
    for name in LIBRARY:
        package = folder / name
        package.mkdir()
        (package / "__init__.py").write_text(f"raise SystemExit('the decoy {name} was imported')\n")
    return folder


def run_python(arguments: list[str], cwd: Path, decoys: Path | str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(decoys), "PYTHONSAFEPATH": ""}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_decoys_bite(tmp_path, decoys):
    result = run_python(["-c", SURFACE], tmp_path, decoys)
    assert result.returncode != 0
    assert "the decoy models was imported" in result.stderr


def test_public_surface_from_the_repository_root(decoys):
    where = "import models, kv_cache, engine\nprint(models.__file__, kv_cache.__file__, engine.__file__)"
    result = run_python(["-c", SURFACE + where], ROOT, decoys)
    assert result.returncode == 0, result.stderr
    files = [Path(name) for name in result.stdout.split()]
    assert files == [ROOT / name / "__init__.py" for name in ("models", "kv_cache", "engine")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_from_another_directory(script, tmp_path, decoys):
    result = run_python([str(ROOT / script), "--help"], tmp_path, decoys)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage:")
