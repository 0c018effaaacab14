"""The public surface imports from the root, and scripts run from anywhere."""

from programs import ROOT, python

SURFACE = """
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""


def test_the_public_surface_imports_from_the_repository_root():
    assert python("-c", SURFACE).code == 0


def test_a_script_runs_from_another_directory(tmp_path):
    ended = python(ROOT / "tests/selfspec_benchmark.py", "--help", cwd=tmp_path)
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
