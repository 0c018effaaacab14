"""Marks of tests that need something of the machine."""

import pytest
import torch

# Looked for when a test asks: importing Inductor takes seconds.
needs_cpp_compiler = pytest.mark.skipif("not __import__('machine').has_cpp_compiler()", reason="no C++ compiler")
needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 weights need VNNI")


def has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:  # InvalidCxxCompiler has moved between PyTorch versions
        return False
