"""The public surface imports from the root, and scripts run from anywhere."""

import pytest
from programs import ROOT, python

SURFACE = """
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""
SCRIPTS = ("tests/selfspec_benchmark.py", "download.py")


def test_the_public_surface_imports_from_the_repository_root():
    assert python("-c", SURFACE).code == 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_from_another_directory(script, tmp_path):
    ended = python(ROOT / script, "--help", cwd=tmp_path)
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
