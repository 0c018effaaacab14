"""cpu_linears.py and cpu_storages.py: a record for every kernel and every storage."""

import json
import shutil
import sys
from pathlib import Path

import torch
from machine import needs_vnni
from programs import run

from reproduce.cpu_linears import installed_kernels


def test_a_kernel_multiplies_by_the_weight_that_it_packed():
    w, x = torch.randn(128, 64), torch.randn(3, 64)
    for kernel in installed_kernels():
        y = kernel.multiply(x.to(kernel.dtype), kernel.pack(w))
        cosine = torch.cosine_similarity(y.float(), x @ w.T)
        assert y.shape == (3, 128) and cosine.min() > (0.98 if "int4" in kernel.name else 0.999), kernel.name


def test_a_record_has_every_kernel_for_every_number_of_rows(tmp_path):
    output = tmp_path / "linears.jsonl"
    ended = run("reproduce/cpu_linears.py", f"--n_layer 1 --rounds 1 --rows 1 3 --output {output}".split())
    assert ended.record == json.loads(output.read_text())
    kernels = ended.record["kernels"]
    order = [(rows, kernel.name) for rows in (1, 3) for kernel in installed_kernels()]
    assert [(row["rows"], row["kernel"]) for row in kernels] == order and all(row["ms"] > 0 for row in kernels)


SCRIPT = "reproduce/cpu_storages.py"
SIZES = "--B 2 --prefix_len 60 --gen_len 12 --turns 2 --draft_budget 16 --gamma 2"
# Stand-in for llama.cpp's worker: a step takes a millisecond for each token of a row.
FAKE_PEER = """#!{python}
import json, sys
run = json.loads(sys.stdin.readline())
assert len(run["prompt"]) == 60 and run["rows"] == 2 and run["model"].endswith("tiny.Q4_1.gguf")
print(json.dumps({{"row_prefill_seconds": 0.5, "entries": run["entries"]}}), flush=True)
for line in sys.stdin:
    block = json.loads(line)
    print(json.dumps({{"ms": [block["tokens"]] * block["steps"]}}), flush=True)
"""


@needs_vnni
def test_every_storage_has_a_row_of_both_samplings(checkpoint: Path, books: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "tiny.Q4_1.gguf").touch()
    peer = tmp_path / "peer"
    peer.write_text(FAKE_PEER.format(python=sys.executable))
    peer.chmod(0o755)
    paths = f"--model {model} --dataset {books} --llama_cpp {peer} --output {tmp_path / 'records.jsonl'}"
    ended = run(SCRIPT, f"{paths} {SIZES}".split())
    assert ended.code == 0, ended.err
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    records = {record["storage"]: record for record in map(json.loads, lines)}
    *ours, f16, q8_0 = records.values()
    stored = [(record["dtype"], record["quantize"], record["kv_dtype"], record["draft_weights"]) for record in ours]
    assert stored == [
        ("float32", None, "float32", "int8"),
        ("bfloat16", None, "bfloat16", "int8"),
        ("bfloat16", None, "int8", "int8"),
        ("bfloat16", "int8", "int8", "int8"),
        ("bfloat16", "int4", "int8", "int4"),
    ]
    for record in ours:
        assert [row["sampling"] for row in record["rows"]] == ["greedy", "coupled, 0.6"]
        assert all(len(row["speedups"]) == 2 and row["wall_speedup"] > 0 for row in record["rows"])
    for record in (f16, q8_0):
        assert record["rows"] == [{"baseline_step_ms": 1, "baseline_tokens_per_second": 2000.0, "verify_step_ms": 3}]


def test_an_interpreter_without_llama_cpp_is_refused(checkpoint: Path, books: Path, tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "tiny.Q4_1.gguf").touch()
    ended = run(SCRIPT, f"--model {model} --dataset {books} {SIZES} --llama_cpp {sys.executable}".split())
    assert "llama-cpp-python" in ended.refusal and "prefill" not in ended.err
