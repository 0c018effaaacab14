"""Run kernels over random shapes beside the reference: LIBRARIES (in the order of KERNELS) and N_SHAPES.

The libraries are built with sanitizers, whose runtimes are preloaded: what they find ends the process. Tensors come
from the sanitizer's malloc, so a kernel that reads one number too many is found.
"""

import ctypes
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from attention_cases import make_case, packed_case
from test_cpp_attention import test_chooses_the_chunks_that_the_reference_does as chooses
from test_cpp_attention import test_copies_chosen_entries_as_the_reference_does as copies
from test_pointwise_cpp import FUNCTIONS, inputs, pairs

from engine.noise import drawn_by
from engine.noise_check import exact
from models import linear_check, linear_cpp
from models.attention.check import ALLOWED, ALLOWED_OVER_INT8, DTYPES
from models.attention.cpp_backend import ENTRIES, CppAttention
from models.pointwise import EAGER
from models.pointwise_check import stored
from models.pointwise_cpp import cpp

library, *others = map(ctypes.CDLL, sys.argv[1:5])
attention, pointwise, draw = CppAttention(library), cpp(others[0]), drawn_by(others[2])
any_of, size = random.choice, random.randint
for seed in range(int(sys.argv[5])):
    random.seed(seed)
    shape = {"dtype": any_of(DTYPES), "storage": any_of(ENTRIES), "group": size(1, 9), "head_dim": any_of((64, 128))}
    shape |= {"sliding_window": any_of((None, size(1, 99))), "seed": seed}
    n_token, capacity = any_of((1, size(2, 16), size(17, 40))), any_of((size(60, 300), size(1000, 2200)))
    ring = any_of((False, True))
    lengths = [size(24 if ring else 1, capacity - 3) for _ in range(size(1, 4))]  # a short ring may have holes only
    cases = [make_case(lengths, n_token, capacity=capacity, ring=ring, n_kv_head=size(1, 3), **shape)]
    if not ring and n_token <= 16:
        cases.append(packed_case(n_token, quant_group=any_of((16, 48)), capacity=size(460, 1500), **shape))
    for case in (*cases, cases[0].among_other_rows()):
        torch.manual_seed(seed)
        found, wanted = case.run(attention).double(), case.reference()
        is_int8 = shape["storage"] == torch.int8
        allowed = 3 * max(ALLOWED[shape["dtype"]], is_int8 * ALLOWED_OVER_INT8) * wanted.abs().max()
        assert (found - wanted).abs().max() <= allowed, (seed, shape, lengths, n_token, capacity, ring)
    if not ring and n_token <= 16 and shape["dtype"] == torch.float32:
        cases[0].assert_notes(attention, tolerance=2e-3)
    for name in FUNCTIONS:
        arguments = inputs(name, size(0, 40), 2 * size(1, 300), any_of(DTYPES), strided=any_of((False, True)))
        for got, expected in pairs(pointwise, name, arguments):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    new, storage = (
        torch.randn(size(1, 4), size(1, 40), 2, size(1, 3), size(1, 150)),
        any_of((torch.float32, torch.int8)),
    )
    assert all(map(torch.equal, stored(new, storage, pointwise), stored(new, storage, EAGER)))
    keys = torch.randint(2**32, (3, size(0, 4)))
    noise = *keys, size(0, 9), size(1, 9000)
    torch.testing.assert_close(draw(*noise), exact(*noise).float(), rtol=1e-6, atol=1e-6)
    if others[1].foretoken_has_linear():
        q = torch.randint(-127, 128, (32 * size(1, 9), 32 * size(1, 20)), dtype=torch.int8)
        x, scale, bias = torch.randn(size(1, 40), q.shape[1]), torch.rand(len(q)), torch.randn(len(q))
        weights = linear_cpp.pack_int8(q), 8, len(q), scale, bias
        got = linear_cpp.linear(x, *weights, linear_cpp.function_of(others[1]))
        expected = x @ (q * scale[:, None]).T + bias
        torch.testing.assert_close(got, expected, rtol=0, atol=0.03 * float(expected.abs().max()))
if others[1].foretoken_has_linear():
    multiply = linear_check.candidate(others[1])
    assert all(case.error(multiply) <= case.allowed for case in linear_check.cases())
for source in ENTRIES:
    copies(attention, source, any_of(ENTRIES))
chooses(attention, any_of((1, 4, 7)), 0)
