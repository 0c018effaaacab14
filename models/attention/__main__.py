"""Print which kernels this machine uses, and the results of their checks."""

from dataclasses import dataclass

import torch

from common import cli
from models.kernels.build import KERNELS, BuildError, choose

ROW = "{kernel:9} {build:6} {what:36} error {error:.1e} of {allowed:.1e}, {ms:.3f} ms, PyTorch {pytorch_ms:.3f} ms"


@dataclass(frozen=True)
class Flags:
    check: bool = False
    """repeat checks whose results are stored"""


def main(flags: Flags) -> None:
    used = []
    for kernel in (name for name in KERNELS if KERNELS[name].source or torch.cuda.is_available()):
        try:
            choice = choose(kernel, flags.check)
        except BuildError as error:
            used.append(f"{kernel}: not used; {error}")
            continue
        used.append("; ".join([f"{kernel}: {choice.build or 'not used'}", *choice.refused]))
        for build, rows in choice.checked.items():
            for row in rows:
                verdict = "right" if row["error"] <= row["allowed"] else "wrong"
                print(f"{ROW.format(kernel=kernel, build=build, **row)}: {verdict}")
    print(*used, sep="\n")


if __name__ == "__main__":
    cli.run_alone(main, Flags)
