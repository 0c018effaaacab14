"""The public surface imports from the root, scripts run from anywhere, and optional packages are optional."""

from tests.support.programs import ROOT, python

# Optional packages, as in an environment of requirements.txt alone on a machine without a GPU.
PROGRAM = """
import runpy, sys
sys.modules.update(dict.fromkeys(("triton", "flash_attn", "llguidance", "matplotlib", "transformers")))
sys.argv = [sys.argv[1], "--draft_policy", "verify_topk", "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as ended:
    assert not ended.code
import cost_model.report, serving.serve, terminal
from models import load_model, ModelConfig
from kv_cache import FullKVCache, StreamingKVCache
from engine import ModelRunner, SelfSpeculation, StandaloneDraft, SamplingParams, generate
"""


def test_programs_run_from_another_directory_without_optional_packages(tmp_path):
    ended = python("-c", PROGRAM, ROOT / "tests/selfspec_benchmark.py", cwd=tmp_path)
    assert ended.code == 0 and ended.out.startswith("usage:"), ended.err
