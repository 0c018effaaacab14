"""Steps that find faults: the machine, tests of the project on its device, programs of several processes."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions

import pytest
import torch

from bench.memory import available_bytes
from common.jsonl import read_lines
from common.launch import missing_launcher
from models.attention.flash_backend import find_flavour
from models.checkpoints.default_model import DEFAULT_CHECKPOINT
from reproduce.gpu_parts.child import Skip, verdict
from reproduce.helpers.load import Endpoint, failed, load, served
from reproduce.helpers.records import Record

FIELDS = "name,driver_version,memory.total,memory.used,mig.mode.current,clocks.max.sm,power.limit"
PACKAGES = ("torch", "triton", "flash", "fa3", "nvidia-nccl", "nvidia-cublas")  # beginnings of names
NO_TESTS, FOUND = 5, 9  # exit codes of pytest without a test, and of compute-sanitizer with an error
PYTEST = ("-q", "-m", "", "-p", "no:cacheprovider")
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "tests/selfspec_benchmark.py")
# Greedy requests come first: rounds that are captured for them do not serve the first sampled request.
REQUESTS = {"greedy": {}, "top_p": {"temperature": 0.8, "top_p": 0.9}, "logprobs": {"logprobs": 0}}


def gpu(device: str) -> Record:
    """Report what nvidia-smi says. Failed if the GPU is partitioned (MIG) or shared, which disturbs times."""
    if not (program := shutil.which("nvidia-smi")):
        raise Skip("there is no nvidia-smi")
    queries = f"--query-gpu={FIELDS}", "--query-compute-apps=pid,process_name,used_memory"
    reports = (subprocess.check_output([program, query, "--format=csv,noheader"], text=True) for query in queries)
    cards, neighbours = (text.splitlines() for text in reports)
    is_cut = any("Enabled" in card for card in cards)
    return verdict(not neighbours and not is_cut, cards=cards, neighbours=neighbours)


def versions(device: str) -> Record:
    """Return the versions of packages with kernels. Failed for a CUDA device if PyTorch is built without CUDA."""
    found = [package for package in distributions() if package.name.lower().startswith(PACKAGES)]
    packages = {package.metadata["Name"]: package.version for package in found}
    built = {"packages": packages, "cuda": torch.version.cuda, "flash": find_flavour(device)[1]}
    return verdict(device == "cpu" or torch.version.cuda is not None, **built)


def launcher(device: str) -> Record:
    """Check that Triton can start kernels."""
    why = None if device == "cpu" else missing_launcher()
    return verdict(why is None, error=why)


def product(device: str) -> Record:
    """Measure the memory that a first matrix product takes beside its matrices, which a memory plan leaves free."""
    free, n, dtype = available_bytes(device), *((64, torch.float32) if device == "cpu" else (4096, torch.bfloat16))
    x = torch.ones(n, n, device=device, dtype=dtype)
    y = x @ x
    is_right, left = bool((y == n).all()), available_bytes(device)
    return verdict(is_right, gib_taken=(free - left - 2 * x.nbytes) / 2**30, gib_left=left / 2**30)


class Reports(list[pytest.TestReport]):
    """A plugin of pytest that collects the reports of each test's set-up, call and end."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.append(report)


def tests(device: str, words: Sequence[str]) -> Record:
    """Run pytest, and name the tests that failed. Processes share the work of compilers on a GPU."""
    processes = () if device == "cpu" else ("-n", "8")
    code = pytest.main([*PYTEST, *processes, *words], plugins=[reports := Reports()])
    failed = [report.nodeid.rpartition("::")[2] for report in reports if report.failed]
    n_passed = sum(report.passed and report.when == "call" for report in reports)
    if code == NO_TESTS or not (n_passed or failed):
        raise Skip("no such test is for this machine")
    errors = dict(pair for report in reports for pair in report.user_properties)
    return verdict(code == 0, n_passed=n_passed, failed=failed, errors=errors)


def sanitized(device: str, words: Sequence[str]) -> Record:
    """Run pytest to the first failure under compute-sanitizer."""
    if not (program := shutil.which("compute-sanitizer")):
        return tests(device, words) | {"sanitizer": "not there"}
    command = [program, "--error-exitcode", str(FOUND), "--target-processes", "all", sys.executable, "-m", "pytest"]
    code = subprocess.run([*command, "-x", *PYTEST, *words]).returncode
    return verdict(code == 0, sanitizer={0: "nothing", FOUND: "errors: see its log"}.get(code, f"pytest: {code}"))


def server(device: str, flags: str, clients: int, tokens: int) -> Record:
    """Measure output tokens per second of requests of each kind, twice. Failed if a request has no answer."""
    if not (DEFAULT_CHECKPOINT / "model.pth").is_file():
        raise Skip("the default model is missing: python download.py, then convert")
    rates, problems = dict[str, float](), list[str]()
    with served([*flags.split(), "--device", device]) as url:
        for kind, body in REQUESTS.items():
            for turn in ("first", "again"):
                endpoint = Endpoint(url, {"temperature": 0.0, "max_tokens": tokens, **body})
                prompts = [f"{number} {kind} {turn}: on a cold morning long ago, " * 5 for number in range(clients)]
                phase = asyncio.run(load(endpoint, prompts, clients))
                problems += map(str, failed(phase.answers))
                rates[f"{kind}_{turn}"] = max(1, sum(answer.n_tokens for answer in phase.answers)) / phase.seconds
    ratios = {"top_p_again_over_first": rates["top_p_again"] / rates["top_p_first"]}
    ratios |= {"greedy_over_logprobs": rates["greedy_again"] / rates["logprobs_again"]}
    return verdict(not problems, error="".join(problems[:1]), **rates, **ratios)


def ranks(device: str, words: str, ways: Sequence[str]) -> Record:
    """Run the self-speculation benchmark on two ranks, once for each of `ways`. Failed if texts differ."""
    if device != "cpu" and torch.cuda.device_count() < 2:
        raise Skip("there is one GPU")
    with tempfile.NamedTemporaryFile() as file:
        for way in ways:
            command = f"{words} {way} --device {device} --output {file.name}".split()
            subprocess.run([sys.executable, *RANKS, *command], check=True)
        records = [record for _, record in read_lines(file.name)]
    is_same = len({record["tokens_sha256"] for record in records}) == 1
    return verdict(is_same, all_reduce=records[0]["all_reduce"], each_ms=[record["round_ms"] for record in records])
