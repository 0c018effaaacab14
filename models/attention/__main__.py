"""Print which kernels this machine uses for attention and what lies around it, and what their check found.

    python -m models.attention --check

checks them anew. Otherwise a kernel is checked when it is first used.
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
    Column(lambda row: row["ms"][0], "ms", ".3f"),
    Column(lambda row: row["ms"][-1], "PyTorch, ms", ".3f"),
    Column(lambda row: "right" if row["error"] <= row["allowed"] else "wrong", "verdict", align="<"),
]


@dataclass(frozen=True)
class Flags:
    check: bool = False
    """check the kernels anew, whatever is remembered"""


def main(flags: Flags) -> None:
    rows, used = [], []
    for kernel in KERNELS:
        try:
            choice = choose(kernel, again=flags.check)
        except BuildError as error:
            used.append(f"{kernel}: PyTorch; {error}")
            continue
        rows += [{"kernel": kernel, "build": build} | row for build, some in choice.checked.items() for row in some]
        what = "PyTorch" if choice.build is None else f"the {choice.build} build"
        used.append("; ".join([f"{kernel}: {what}", *choice.refused]))
    for name in ("triton", "flash") if torch.cuda.is_available() else ():
        try:
            choice = checked(name, torch.device("cuda"), again=flags.check)
        except BuildError as error:
            used.append(f"{name}: another backend; {error}")
            continue
        rows += [{"kernel": name, "build": "-"} | row for row in choice.checked[name]]
        used.append("; ".join([f"{name}: {choice.build or 'another backend'}", *choice.refused]))
    print(console(rows, COLUMNS), *used, sep="\n")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
