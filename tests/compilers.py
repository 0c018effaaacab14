"""What torch.compile needs on a CPU."""

from __future__ import annotations


def has_cpp_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return bool(get_cpp_compiler())
    except Exception:  # InvalidCxxCompiler has moved between PyTorch versions
        return False
