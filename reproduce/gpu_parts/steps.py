"""The steps of the first hour on a GPU in order, with the steps that each needs, its deadline, and estimates."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A step. run: MODULE.FUNCTION of this package. given: its arguments. quick: arguments that replace them in a quick
    run. needs: steps that have to succeed before. after: a step that has to fail before. beside: starts together with
    the step before it. shows: main figures by name, with an estimate for an H100 that they should not exceed, or None.
    seconds: after which it is killed."""

    name: str
    run: str
    given: Mapping[str, Any] = {}
    quick: Mapping[str, Any] = {}
    shows: Mapping[str, float | None] = {}
    needs: tuple[str, ...] = ("launcher", "product")
    after: str | None = None
    beside: bool = False
    seconds: float = 120


def test(name: str, which: str, file: str = "gpu_correctness", run: str = "checks.tests", **more: Any) -> Step:
    given = {"words": [f"tests/test_{file}.py", "-k", which]}
    return Step(name, run, given, shows={"n_passed": None, "failed": None}, seconds=240, **more)


def rounds(name: str, size: str, more: str, shows: str = "", **estimates: float) -> Step:
    figures = {"B": None, "round_ms": None, **dict.fromkeys(shows.split()), "gap_percent": None, "peak_over_plan": 1}
    words, quick = {"words": f"{size} {more} --compile"}, {"words": f"{QUICK} {more}"}
    return Step(name, "rounds.measure", words, quick, figures | estimates)


def bandwidth(backend: str, most: float, needs: str, name: str = "", **more: Any) -> Step:
    given = {"backend": backend, "tokens": (1, 4), "shapes": SHAPES} | more
    quick = {"backend": "cpp" if backend == "triton" else backend, "shapes": [(9, 3, 64, 2, 200)]}
    shows = {"median_times_copy": most, "worst_times_copy": None, "worst": None, "copy_tb_per_s": None}
    return Step(name or f"bandwidth {backend}", "times.attention", given, quick, shows, (needs,))


DUMMY = "--load_format dummy --model_name"
QUICK = f"{DUMMY} JackFram/llama-68m --B 2 --prefix_len 96 --gen_len 16 --draft_budget 64"
SMALL, LLAMA = f"{DUMMY} HuggingFaceTB/SmolLM2-135M-Instruct", f"{DUMMY} meta-llama/Meta-Llama-3.1-8B"
SELF, COUPLED = "--draft_budget 512 --gamma 3 --gen_len 48", "--temperature 0.6 --verification coupled"
BOOK, AUTO = f"--B 22 --prefix_len 7500 {SELF}", f"--gamma auto --draft_policy auto {COUPLED}"
STEP_TIMES = "baseline_step_ms draft_step_ms verify_step_ms"
# Query and KV heads, head_dim, rows, entries a row.
SHAPES = [(32, 8, 128, 32, 16000), (32, 8, 128, 8, 64000), (32, 32, 128, 32, 4000), (9, 3, 64, 64, 7500)]
NOTES = [(32, 8, 128, 1, 32000), (32, 8, 128, 64, 4000)]
LAYERS = {"shapes": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)], "rows": (16, 64, 128, 256)}
OF_LAYERS = {"plain_ms_64": None, "int8_over_plain_64": 1, "int4_over_plain_16": 0.7, "int4_over_plain_256": 2}
SERVER = "--max_length 1024 --gamma 3 --max_batch"
OF_SERVER = {"greedy_again": None, "top_p_again": None, "top_p_again_over_first": 1.5, "greedy_over_logprobs": 1.2}
RANKS = {"words": f"{SMALL} --B 8 --prefix_len 1000 {SELF}", "ways": ("", "--no_cuda_graphs")}
REDUCE = "tests/engine/parallel/test_all_reduce.py"
STEPS = (
    Step("gpu", "checks.gpu", shows={"cards": None, "neighbours": None}, needs=()),
    Step("versions", "checks.versions", shows={"cuda": None, "flash": None}, needs=()),
    Step("launcher", "checks.launcher", needs=()),
    Step("product", "checks.product", shows={"gib_taken": 1, "gib_left": None}, needs=()),
    test("attention triton", "attention and triton"),
    test("attention flash", "attention and flash", beside=True),
    test("attention torch", "attention and (torch or cpp)", beside=True),
    test("numbers", "numbers", beside=True),
    test("attention again", "attention and triton", run="checks.sanitized", after="attention triton"),
    test("identity eager", "identity_eager"),
    test("identity compiled", "identity_compiled", beside=True),
    test("owners", "owners", run="checks.sanitized", beside=True),
    test("drafters", "real_graphs", "captured_rounds", beside=True),
    *(
        rounds(f"profile {policy}", f"{LLAMA} --B 32 --prefix_len 4000 {SELF}", f"--draft_policy {policy}",
               "kernel_ms refresh_ms", nodes_per_layer=60)
        for policy in ("verify_topk", "quantized", "retrieval")
    ),
    bandwidth("triton", 1.25, "launcher", kv=("same", "int8")),
    bandwidth("flash", 1.5, "attention flash"),
    bandwidth("torch", 10, "product"),
    bandwidth("triton", 1.75, "launcher", "notes", tokens=(4,), shapes=NOTES, has_scores=True),
    Step("linears", "times.linears", LAYERS, {"shapes": [(128, 64)], "rows": (16, 64)}, OF_LAYERS),
    Step("noise", "times.noise", {"rows": 64, "tokens": 4, "n_ids": 128256}, {"rows": 2, "n_ids": 501},
         {"noise_ms": 1.5, "times_copy": None}),
    rounds("gaps", f"{SMALL} --B 64 --prefix_len 7500 {SELF}", COUPLED, "kernel_ms", gap_percent=15),
    rounds("speculation", BOOK, "", "speedup acceptance_rate", differing_rows=0),
    rounds("speculation coupled", BOOK, COUPLED, "speedup acceptance_rate", differing_rows=0),
    rounds("costs 16k", f"{LLAMA} --B 32 --prefix_len 16000 {SELF}", "", STEP_TIMES),
    rounds("costs 32k int8", f"{LLAMA} --B 32 --prefix_len 32000 {SELF}", "--kv_dtype int8", STEP_TIMES),
    rounds("autos", f"{SMALL} --B 64 --prefix_len 4000", AUTO, "graphs", warm_up_seconds=60),
    Step("server", "checks.server", {"flags": f"{SERVER} 64", "clients": 64, "tokens": 96},
         {"flags": f"{SERVER} 2", "clients": 2, "tokens": 4}, OF_SERVER),
    Step("ranks", "checks.ranks", RANKS, {"words": QUICK, "ways": [""]}, {"all_reduce": None, "each_ms": None}),
    test("a stopped rank", "answers_no_more", "rank_scripts", needs=("ranks",), quick={"words": [REDUCE]}),
)  # fmt: skip
