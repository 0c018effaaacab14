"""Writes docs/performance.md from pages/performance.md and the records in reproduce/results/.

    python reproduce/performance_page.py

No number on the page comes from anywhere but a record; what has no record is "not measured".
"""

import common.startup

from pathlib import Path

from common import cli
from common.checkout import ROOT
from common.tables import Column
from reproduce import drafters, policies, serve_load, spec_bench
from reproduce.pages.generated_page import GPU, RESULTS, NoFlags, filled, read, table, write
from reproduce.paper.columns import DRAFT, NONE, SPECULATION, measured, of, rows_of
from reproduce.paper.published import Record
from reproduce.sweeping.runner import OK, read_rows

PAGE = ROOT / "docs" / "performance.md"
CHECKS = "gpu_attention_error", "gpu_quantised_error", "gpu_noise", "gpu_identity"


SETS, LOADS, DRAFTERS, POLICIES = "spec_bench.jsonl", "serve_load.jsonl", "drafters.jsonl", "policies.jsonl"
PROMPTS = Column(lambda record: f"{record['shortest']} to {record['longest']}", "prompt tokens")
SERVED = [*of("model"), Column("turns", "turns"), PROMPTS, Column("temperature", "temperature"), *serve_load.COLUMNS]
CATEGORIES = [*of("model", "B"), *spec_bench.COLUMNS]
PAIRS = of("prefix_len", "B", "verification", *DRAFT, "pointwise", *SPECULATION, "identical", "pairs")
SELFSPEC = of("prefix_len", "B", "verification", "temperature", *DRAFT, *SPECULATION, "decode_tokens_per_second")
SELFSPEC += of("identical", "distinct_4gram_fraction", "prompt_overlap")
COSTS = of("model", "prefix_len", "B", "kv_dtype", *DRAFT, "baseline_step_ms", "baseline_share_of_copy")
COSTS += of("draft_step_ms", "verify_step_ms", "round_ms")
GAPS = of("model", "prefix_len", "B", "gamma", "round_ms", "kernel_ms_per_round", "gap_percent")
GAPS += [
    Column(lambda record: f"`{record['largest'][0]['kernel'][:60]}`", "largest kernel", align="<"),
    Column(lambda record: record["largest"][0]["ms_per_round"], "of it, ms", ".2f"),
]
OUTCOME = Column("status", "outcome", lambda status: "passed" if status == "done" else "FAILED", align="<")
OUTCOMES = of("cell", OUTCOME, "worst_error", "tolerance")
KV_BYTES = Column(lambda row: f"{row['kv_bytes'] * 1e-6:.0f}{' *' if row['is_large'] else ''}", "MB of KV")
READING = of(Column("model", "shape of", align="<"), "B", "S", "T", "kv_dtype", KV_BYTES)
READING += [Column("backend", "backend", align="<"), Column("share_of_copy", "share of the copy", ".0%")]
KERNELS = [
    *(Column("variants", "variants"), Column("max_registers", "registers of a thread, at most")),
    Column(
        lambda record: " and ".join(f"{n} on {gpu}" for gpu, n in record["max_shared_bytes"].items()),
        "bytes of shared memory of a block, at most",
    ),
    Column(lambda record: len(record["problems"]), "that spill or do not fit"),
]


def tables(folder: Path) -> dict[str, str]:
    """What stands at each place of the template."""

    def done(benchmark: str) -> list[Record]:
        """Those that measured something: an error is no measurement."""
        return [record for record in read(folder, GPU, benchmark) if record.get("status") != "error"]

    pairs, peers, kernels = "cpu_fast_path.jsonl", "cpu_peers.jsonl", "kernel_report.jsonl"
    medians = [record | record["median"] for record in read(folder, pairs, "cpu_selfspec_summary")]
    cells = [record | {"pairs": record["repeats"]} for record in read(folder, pairs, "gamma_cell")]
    medians += [row for row in rows_of(cells) if row["way"] != "plain"]
    plain, copies = read(folder, peers, "cpu_peers"), done("gpu_copy_bandwidth")
    steps = dict.fromkeys(key for record in plain for key in record if key.startswith("step_ms: "))
    times = [measured(key, f"{key.removeprefix('step_ms: ')}, ms", ".1f") for key in steps]
    compiled, sets = read(folder, kernels, "kernel_report")[-1:], read(folder, SETS, spec_bench.BENCHMARK)
    loads = read(folder, LOADS, serve_load.BENCHMARK)
    served, texts = rows_of(loads), read(folder, DRAFTERS, drafters.BENCHMARK)
    cells = [row["record"] | {"file": POLICIES} for row in read_rows(folder / POLICIES).values() if row["status"] == OK]
    timed, judged = policies.timed(cells), [record for record in cells if "rows" in record]
    by_budget = policies.ACCEPTED, POLICIES, policies.judged(cells)
    return {
        "cpu_pairs": table("Speculation on a CPU", medians, PAIRS, pairs),
        "cpu_peers": table("A plain step beside other libraries", plain, of("prefix_len", "B", *times, "dtype"), peers),
        "prompt_sets": table("Prompt sets", sets, CATEGORIES, SETS, spec_bench.table_rows(sets)),
        "drafters": table("Drafters by text", texts, drafters.COLUMNS, DRAFTERS, rows_of(texts)),
        "policies_acceptance": table("Acceptance of policies by budget", judged, *by_budget),
        "policies_speed": table("Speed of policies by budget", timed, policies.SPEED, POLICIES),
        "serving": table("Serving", loads, SERVED, LOADS, served),
        "gpu_selfspec": table("Speculation on a GPU", done("gpu_selfspec"), SELFSPEC, GPU),
        "gpu_costs": table("Costs of 8B and 7B shapes", done("gpu_costs"), COSTS, GPU),
        "gpu_copy": "".join(f"{copy['bytes_per_second'] * 1e-12:.2f} TB/s" for copy in copies[-1:]) or NONE,
        "gpu_attention_bandwidth": table("Bandwidth of attention", done("gpu_attention_bandwidth"), READING, GPU),
        "gpu_launch_gaps": table("Host and launch gaps of a round", done("gpu_launch_gaps"), GAPS, GPU),
        "gpu_correctness": table("Correctness on a GPU", read(folder, GPU, *CHECKS), OUTCOMES, GPU),
        "kernel_report": table("Triton kernels", compiled, KERNELS, kernels),
    }


def page(folder: Path = RESULTS) -> str:
    text = filled("performance.md", tables(folder))
    # What these call results/ lies elsewhere, as seen from this page.
    return text.replace("](results/", "](../reproduce/results/").replace("`results/", "`reproduce/results/")


if __name__ == "__main__":
    cli.run_alone(lambda flags: write(PAGE, page()), NoFlags)
