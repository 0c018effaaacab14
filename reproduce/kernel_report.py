"""Compile the Triton kernels without a GPU, and report registers, shared memory and spills of every variant.

    python -m reproduce.kernel_report --output reproduction/kernel_report.jsonl

Compiles the launches that the backend would make, with Triton's ptxas. Exit code 1 if a variant spills registers or
needs more shared memory than a block may have.
"""

import sys

from bench.config import Output
from common import cli
from common.errors import ConfigError
from common.jsonl import publish, require_appendable
from common.provenance import provenance
from common.say import say
from common.tables import Column, console

NAMES = ("arch", "registers", "shared", "spill_stores", "spill_loads", "threads")
COLUMNS = [Column("variant", "variant", align="<"), *(Column(name, name) for name in NAMES)]


def main(flags: Output) -> None:
    try:
        import triton
    except ImportError:
        what, where, required = "the kernels cannot be compiled", "reproduce/kernel_report.py", "triton 3.6 or newer"
        fix = "pip install -r requirements-dev.txt"
        raise ConfigError(what, where, "no triton package", required, fix) from None
    from reproduce.gpu_parts.kernels import SHARED_LIMIT, compile_launch, problem_of, variants

    require_appendable(flags.output)
    kernels = []
    for arch in SHARED_LIMIT:
        for variant, launch in variants(arch):
            kernels.append(compile_launch(variant, launch, arch))
            say(f"compiled {variant} for sm_{arch}")
    most_shared = {f"sm_{arch}": max(x["shared"] for x in kernels if x["arch"] == arch) for arch in SHARED_LIMIT}
    problems, most_registers = list(filter(None, map(problem_of, kernels))), max(x["registers"] for x in kernels)
    record = {"benchmark": "kernel_report", "triton_version": triton.__version__, "variants": len(kernels)}
    record |= {"max_registers": most_registers, "max_shared_bytes": most_shared, "problems": problems}
    summary = f"{len(kernels)} variants, at most {most_registers} registers, {len(problems)} problems"
    table = console(kernels, COLUMNS, indent="")
    publish(flags.output, record | {"kernels": kernels} | provenance(), table, summary)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    cli.run_alone(main, Output)
