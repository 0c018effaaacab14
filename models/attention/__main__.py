"""Print which kernels this machine uses for attention and around it, and what their checks found.

    python -m models.attention --check

repeats the checks. A kernel is also checked when it is first used.
"""

from dataclasses import dataclass

import torch

from common import cli
from common.tables import Column, console
from models.attention.gpu_check import checked
from models.cpp_build import KERNELS, BuildError, choose

COLUMNS = [
    *(Column(key, head, align="<") for key, head in (("kernel", "kernel"), ("build", "build"), ("what", "inputs"))),
    Column("error", "max error", ".1e"),
    Column("allowed", "allowed", ".1e"),
    Column("ms", "ms", ".3f"),
    Column("pytorch_ms", "PyTorch, ms", ".3f"),
    Column(lambda row: "right" if row["error"] <= row["allowed"] else "wrong", "verdict", align="<"),
]


@dataclass(frozen=True)
class Flags:
    check: bool = False
    """check the kernels again, whatever is remembered"""


def main(flags: Flags) -> None:
    rows, used = [], []
    for kernel in (*KERNELS, *(("triton", "flash") if torch.cuda.is_available() else ())):
        try:
            cpp = kernel in KERNELS
            choice = choose(kernel, flags.check) if cpp else checked(kernel, torch.device("cuda"), flags.check)
        except BuildError as error:
            used.append(f"{kernel}: not used; {error}")
            continue
        rows += [{"kernel": kernel, "build": build} | row for build, found in choice.checked.items() for row in found]
        used.append("; ".join([f"{kernel}: {choice.build or 'not used'}", *choice.refused]))
    print(console(rows, COLUMNS), *used, sep="\n")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
