"""Marks of tests that need something of the machine."""

import shutil

import pytest
import torch

from models.kernels import linear_cpp

needs_cpp_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler")
needs_bfloat16_products = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="it needs AVX512-BF16")
needs_bfloat16_layers = pytest.mark.skipif(
    not linear_cpp.multiplies_bfloat16(), reason="no kernel multiplies bfloat16 here"
)
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="it needs VNNI")
needs_int8 = pytest.mark.skipif(
    not (torch.cpu._is_vnni_supported() or linear_cpp.runs()), reason="int8 weights need VNNI, or the C++ kernel"
)
