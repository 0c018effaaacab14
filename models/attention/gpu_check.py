"""Compare attention kernels with PyTorch on this GPU, once, and remember the result.

`models.kernels.check` runs the cases in a separate process, which a kernel that breaks the GPU ends with it. Times are
printed and decide nothing: small cases take the host's time, which replayed rounds do not need.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from common.provenance import package_version
from models.attention.base import AttentionBackend
from models.attention.check import BLOCKS, IN_4_BITS, REFERENCE, SHAPES, cases_of
from models.kernels.build import BuildChoice, BuildError, cache_file, check, remembered
from models.kernels.check import Case

__all__ = ["REFERENCE", "candidate", "cases", "checked", "refusal"]
DEVICE, DTYPE = "cuda", torch.bfloat16
# Packages with kernels: after a change of version, kernels are checked anew.
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "fa3-fwd")


def candidate(name: str) -> AttentionBackend:
    """Return the backend of that name, "triton" or "flash". The fallback of flash is PyTorch here."""
    if name == "triton":
        from models.attention.triton_backend import TritonAttention

        return TritonAttention()
    from models.attention.flash_backend import FlashAttention, find_flavour

    flavour, why = find_flavour(DEVICE)
    assert flavour is not None, why
    return FlashAttention(flavour, REFERENCE)


def cases() -> Iterator[Case]:
    """Yield cases of ragged rows over entries in each storage: a single token, and a block."""
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
    """Return the remembered check of a backend for this GPU, these packages and this source, or check it (anew if
    `again`). Errors: BuildError if the check does not end; OSError if its result cannot be kept."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    versions, texts = map(package_version, PACKAGES), (path.read_text() for path in sources)
    about = [torch.cuda.get_device_name(device), *map(str, versions), *texts]
    title = f"checking the {name} kernels on this GPU, once"
    return remembered(cache_file(name, "json", *about), title, lambda: _compared(name), again)


def _compared(name: str) -> BuildChoice:
    """Compare a backend with PyTorch. Errors: BuildError if the check does not end, so that nothing is remembered."""
    rows, wrong = check(__name__, name)
    if not rows:
        raise BuildError(wrong or "its check has no cases")
    return BuildChoice(None if wrong else name, [wrong] if wrong else [], {name: rows})
