"""Whether attention kernels for a GPU are right there: compared with PyTorch once, and remembered.

`models.kernel_check` runs the cases in a process of its own, which a kernel that breaks the GPU takes along. Times are
printed and decide nothing: calls of so small cases take what the host takes, and rounds are replayed without it.
"""

import hashlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path

import torch

from models.attention.base import AttentionBackend
from models.attention.check import BLOCKS, IN_4_BITS, REFERENCE, SHAPES, cases_of
from models.cpp_build import BuildChoice, BuildError, cache_folder, check, remembered
from models.kernel_check import Case

__all__ = ["REFERENCE", "candidate", "cases", "checked", "refusal"]
DEVICE, DTYPE = "cuda", torch.bfloat16
# What kernels come with: another version is checked anew.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "fa3-fwd")


def candidate(name: str) -> AttentionBackend:
    """Make the backend of that name, "triton" or "flash". What flash leaves to others is PyTorch's here."""
    if name == "triton":
        from models.attention.triton_backend import TritonAttention

        return TritonAttention()
    from models.attention.flash_backend import FlashAttention, find_flavour

    flavour, why = find_flavour(DEVICE)
    assert flavour is not None, why
    return FlashAttention(flavour, REFERENCE)


def cases() -> Iterator[Case]:
    """Yield cases of ragged rows by name, for entries in each storage: one token and a block."""
    for storage, shape, n_token in product((DTYPE, torch.int8, IN_4_BITS), SHAPES, BLOCKS[:2]):
        yield cases_of(DTYPE, storage, shape, n_token, DEVICE)[0]


def refusal(name: str, device: torch.device) -> str | None:
    """Return why the kernels of a backend, "triton" or "flash", are not used on a GPU; None if they are."""
    try:
        return "; ".join(checked(name, device).refused) or None
    except BuildError as error:
        return str(error)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        return f"its check cannot be kept (FORETOKEN_CACHE names another folder): {str(error)[:200]}"


def checked(name: str, device: torch.device, again: bool = False) -> BuildChoice:
    """Check a backend, unless that was done for this GPU, these packages and this source.

    Errors: BuildError if the check came to no end; OSError if its result cannot be kept."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    about = [torch.cuda.get_device_name(device), *map(_version, PACKAGES), *(path.read_text() for path in sources)]
    memory = cache_folder().absolute() / f"{name}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"
    return remembered(memory, f"checking the {name} kernels on this GPU, once", lambda: _compared(name), again)


def _compared(name: str) -> BuildChoice:
    """Errors: BuildError, so that nothing is remembered, if the check did not come to an end."""
    rows, wrong = check(__name__, name)
    if not rows:
        raise BuildError(wrong or "its check has no cases")
    return BuildChoice(None if wrong else name, [wrong] if wrong else [], {name: rows})


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
