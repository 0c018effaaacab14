"""The page's part on predictions from data sheets: how far off they are, by which constant, and on this CPU."""

from collections.abc import Sequence

from common.tables import Column, markdown
from reproduce import roofline_error
from reproduce.pages.generated_page import absent, source
from reproduce.paper.columns import NONE, machine_name
from reproduce.paper.cpu_roofline import summary
from reproduce.paper.published import Record

COSTS = (
    Column("B", "rows"),
    Column("prefix_len", "context"),
    Column("cost", "cost", align="<"),
    Column("predicted_ms", "predicted, ms", ".1f"),
    Column("measured_ms", "measured, ms", ".1f"),
    Column(lambda row: row["predicted_ms"] / row["measured_ms"] - 1, "error", "+.0%"),
)


def opening(runs: Sequence[Record], is_published_measured: bool, cpu: Sequence[Record]) -> str:
    """What was measured where, what is predicted, and how far off that is."""
    where = ", ".join(dict.fromkeys(map(machine_name, runs))) or NONE
    models = "published models among them" if is_published_measured else "no published model among them"
    on_cpu = summary(cpu) if cpu else f"{NONE} where both could be compared"
    return (
        f"*Measured*: what has a record, on {where}; {models}. *Predicted*: what is called so, never in a column of "
        f"measurements. How far off: {roofline_error.summary()}; {on_cpu}."
    )


def roofline_section(cpu: Sequence[Record], figure: str) -> str:
    """figure: a link to the script's."""
    file = roofline_error.ROOFLINE
    on_cpu = (
        f"{markdown(cpu[-1]['rows'], COSTS)}\n\n{source(cpu[-1:])}" if cpu else absent("The roofline on a CPU", file)
    )
    return (
        "## Predicted from data sheets\n\n"
        "`engine/cost_model/roofline.py` predicts costs from bytes moved and operations, with the numbers of "
        "`engine/cost_model/machines.py`, each with its source; `python reproduce/roofline_error.py` compares. No "
        "prediction here is a measurement.\n\n"
        "Median errors of published speedups. The halves are every other setting by machine, context and rows. "
        "*Assumed*: the acceptance published for Llama-3.1-8B, from which another pair's may be far. FlashAttention-2 "
        "by itself has tiles of 64 rows, and one for every head where there are several tokens; MagicDec's repository "
        "later packs the heads that share KV, and which kernels were timed is not published: the former were chosen "
        "because they are nearer, on all numbers. That the link matters was seen on the half to fit, before the "
        "bandwidth of NCCL's protocols was put in. So errors before a fit are no blind test, and of the other half "
        f"only the fitted constants saw nothing.\n\n{markdown(roofline_error.errors(), roofline_error.ERRORS)}\n\n"
        "Each constant alone, as a factor of what is stated, fitted to the same half, and what it leaves there of the "
        "root mean square of the logarithms' differences:\n\n"
        f"{markdown(roofline_error.constants(), roofline_error.LEFT)}\n\n"
        f"{figure}On a CPU, by rates that were measured right before and after each cell, of layers as large as the "
        f"default model's, whatever else the machine did; the last run:\n\n{on_cpu}"
    )
