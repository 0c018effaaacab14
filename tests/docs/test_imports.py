"""The public surface imports from the root, and scripts run from anywhere."""

from tests.support.programs import ROOT, python

SURFACE = """
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""

# Optional packages, as in an environment of requirements.txt alone on a machine without a GPU.
WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn", "llguidance", "matplotlib", "transformers")))
import cost_model.report, serving.serve, terminal
from bench.benchmark_flags import SelfSpecFlags
from common import cli
cli.read(SelfSpecFlags, ["--draft_policy", "verify_topk"], "selfspec_benchmark.py").config()
"""


def test_programs_need_no_optional_package():
    ended = python("-c", WITHOUT)
    assert ended.code == 0, ended.err


def test_the_public_surface_imports_from_the_repository_root():
    assert python("-c", SURFACE).code == 0


def test_a_script_runs_from_another_directory(tmp_path):
    ended = python(ROOT / "tests/selfspec_benchmark.py", "--help", cwd=tmp_path)
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
