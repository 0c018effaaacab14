"""The checkout's packages win over namesakes, from anywhere."""

import pytest
from programs import ROOT, python

LIBRARY = ("common", "kv_cache", "models", "engine", "serving")
SURFACE = """
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""
SCRIPTS = [f"tests/{name}_benchmark.py" for name in ("selfspec", "baseline", "longspec")]
SCRIPTS += ["download.py", "convert_hf_checkpoint.py", "foretoken.py"]


@pytest.fixture(scope="module")
def beside_decoys(tmp_path_factory) -> dict[str, str]:
    """The environment of a site-packages with unrelated packages of the same names."""
    folder = tmp_path_factory.mktemp("site-packages")
    for name in LIBRARY:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('the decoy {name} was imported')\n")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": ""}


def test_the_decoys_bite(tmp_path, beside_decoys):
    ended = python("-c", SURFACE, cwd=tmp_path, **beside_decoys)
    assert ended.code != 0 and "the decoy models was imported" in ended.err


def test_public_surface_from_the_repository_root(beside_decoys):
    where = "import models, kv_cache, engine\nprint(models.__file__, kv_cache.__file__, engine.__file__)"
    ended = python("-c", SURFACE + where, **beside_decoys)
    assert ended.code == 0, ended.err
    assert ended.out.split() == [str(ROOT / name / "__init__.py") for name in ("models", "kv_cache", "engine")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_from_another_directory(script, tmp_path, beside_decoys):
    ended = python(ROOT / script, "--help", cwd=tmp_path, **beside_decoys)
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
