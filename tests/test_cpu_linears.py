"""The survey of kernels for linear layers on a CPU: each multiplies right, and the record has all of them."""

import json

import torch
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
    assert [(one["rows"], one["kernel"]) for one in kernels] == order and all(one["ms"] > 0 for one in kernels)
