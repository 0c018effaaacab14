"""Print which kernels this machine uses, and why others are not used."""

from dataclasses import dataclass

import torch

from common import cli
from models.kernels.build import KERNELS, BuildError, choose


@dataclass(frozen=True)
class Flags:
    check: bool = False
    """repeat checks whose results are stored"""


def main(flags: Flags) -> None:
    for kernel in (name for name in KERNELS if KERNELS[name].source or torch.cuda.is_available()):
        try:
            build, refused = choose(kernel, flags.check)
        except BuildError as error:
            build, refused = None, [str(error)]
        print("; ".join([f"{kernel}: {build or 'not used'}", *refused]))


if __name__ == "__main__":
    cli.run(main, Flags)
