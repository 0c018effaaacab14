"""The certificate of production precision: what it counts, that it can fail, and the script as a user runs it."""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import TINY, continue_by_recomputing, full_cache, random_prompts, tiny_model
from torch import Tensor

from common.errors import ConfigError, UserError
from engine import ModelRunner, SamplingParams, SelfSpeculation, generate
from engine.evaluation.certificate import MAX_FLIP_SHARE, Calibration, Certificate, Replay, calibrate, certify, replay
from engine.noise import Stream, gumbel
from kv_cache import FullKVCache, StreamingKVCache, WriteThroughKVCache
from kv_cache.entries import LARGEST
from models import Transformer
from models.attention import select_backend
from models.llama import attention_spec
from models.quantize import quantize_head, quantize_linears

ROOT = Path(__file__).resolve().parents[1]
LENGTHS, N_NEW, N_FORCED, GAMMA = [9, 14, 23], 40, 48, 3
GREEDY, COUPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=5)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
MODES = pytest.mark.parametrize("sampling", [GREEDY, COUPLED], ids=["greedy", "coupled"])


@pytest.fixture
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS)


class Faulty(ModelRunner):
    """Its verifications are off by up to `size`; one-token forwards and what is not speculation are right."""

    size = 3.0

    def step(self, tokens, positions, extent, cache=None):
        logits = super().step(tokens, positions, extent, cache)
        if not isinstance(cache, WriteThroughKVCache):
            return logits
        generator = torch.Generator().manual_seed(extent)
        return logits + self.size * (2 * torch.rand(logits.shape, generator=generator) - 1).to(logits.dtype)


def speculate(
    model: Transformer,
    prompts: list[list[int]],
    sampling: SamplingParams,
    runner_class: type[ModelRunner] = ModelRunner,
    cache: FullKVCache | None = None,
) -> Tensor:
    """Self-speculation's tokens `[B, N_NEW]`; rows differ in length and in how many drafts they accept."""
    runner = runner_class(model, cache or full_cache(model, len(prompts)))
    draft_cache = StreamingKVCache(model.config, len(prompts), budget=14, n_sink=2, dtype=runner.cache.keys.dtype)
    mode = "greedy" if sampling.greedy else "coupled"
    drafter = SelfSpeculation(runner, draft_cache, GAMMA)
    out = generate(runner, prompts, max_new_tokens=N_NEW, drafter=drafter, sampling=sampling, verification=mode)
    assert 0 < out.stats.accepted < out.stats.drafted
    assert len({row.accepted for row in out.stats.rows}) > 1
    return torch.tensor(out.tokens)


def forced_text(prompts: list[list[int]]) -> Tensor:
    return torch.tensor(random_prompts([N_FORCED] * len(prompts), seed=1))


def calibration_of(model: Transformer, prompts: list[list[int]], cache: FullKVCache | None = None) -> Calibration:
    cache = cache or full_cache(model, len(prompts))
    return calibrate(model, cache, prompts, forced_text(prompts), GAMMA + 1)


def certificate_of(
    model: Transformer, prompts: list[list[int]], emitted: Tensor, sampling: SamplingParams
) -> Certificate:
    eps = calibration_of(model, prompts).eps / (sampling.temperature or 1)
    return certify(replay(model, full_cache(model, len(prompts)), prompts, emitted, sampling), eps)


def scores_by_recomputing(
    model: Transformer, prompt: list[int], emitted: list[int], sampling: SamplingParams, row: int
) -> Tensor:
    """What each of a row's tokens is the argmax of, `[n, V]`, from one forward over the whole sequence."""
    tokens = prompt + emitted
    logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], full_cache(model, 1))
    logits = logits[0, len(prompt) - 1 : -1].double()
    if sampling.greedy:
        return logits
    position = torch.arange(len(prompt), len(tokens))
    noise = gumbel(torch.tensor(sampling.seed), torch.tensor(row), position, Stream.COUPLED, TINY.vocab_size)
    return (logits / sampling.temperature).log_softmax(-1) + noise.double()


@MODES
def test_float64_has_neither_flips_nor_near_ties(prompts, sampling):
    model = tiny_model()
    result = certificate_of(model, prompts, speculate(model, prompts, sampling), sampling)
    assert (result.tokens, result.rows) == (len(LENGTHS) * N_NEW, len(LENGTHS))
    assert (result.near_ties, result.flips, result.flips_outside_near_ties) == (0, 0, 0)
    assert result.largest_gap_at_flip is None
    assert result.rows_without_flip == len(LENGTHS)
    assert result.holds


class OtherKernels(Transformer):
    """Forwards of more than one token are off by up to 0.2, whoever runs them.

    A large model in low precision does it by itself; one as small as these rounds nearly always alike.
    """

    def forward(self, tokens, positions, cache):
        logits = super().forward(tokens, positions, cache)
        if tokens.shape[1] == 1:
            return logits
        generator = torch.Generator().manual_seed(int(positions.sum()))
        return logits + 0.2 * (2 * torch.rand(logits.shape, generator=generator) - 1).to(logits.dtype)


@MODES
@DTYPES
def test_blocks_that_round_otherwise_flip_near_ties_and_the_certificate_holds(prompts, sampling, dtype):
    model = tiny_model(dtype=dtype)
    model.__class__ = OtherKernels
    calibration = calibration_of(model, prompts)
    assert 0.19 < calibration.median <= calibration.eps < 0.3
    assert 0 < calibration.flips < calibration.positions / 4
    assert 0 < calibration.gap_change <= 2 * calibration.eps
    result = certificate_of(model, prompts, speculate(model, prompts, sampling), sampling)
    assert 0 < result.flips < result.near_ties < result.tokens / 2
    assert result.near_tie_fraction == result.near_ties / result.tokens
    assert result.largest_gap_at_flip is not None
    assert 0 < result.largest_gap_at_flip < 2 * calibration.eps / (sampling.temperature or 1)
    assert result.rows_without_flip < result.rows
    assert result.holds


@MODES
def test_plain_decoding_is_its_own_reference_to_the_bit(prompts, sampling):
    model = tiny_model(dtype=torch.bfloat16)
    mode = "greedy" if sampling.greedy else "coupled"
    runner = ModelRunner(model, full_cache(model, len(prompts)))
    out = generate(runner, prompts, max_new_tokens=N_NEW, sampling=sampling, verification=mode)
    # The cache that was decoded into serves again, whatever it holds: the reference fills its rows anew.
    runner.cache.keys.normal_()
    seen = replay(model, runner.cache, prompts, torch.tensor(out.tokens), sampling)
    assert not seen.flipped.any()
    assert not seen.deficit.any()


@MODES
def test_the_reference_scores_what_was_emitted_given_what_was_emitted(prompts, sampling):
    """Tokens that nobody would choose; gaps and deficits as one forward over the whole sequence gives them."""
    model = tiny_model()
    emitted = torch.tensor(random_prompts([12] * len(prompts), seed=3))
    seen = replay(model, full_cache(model, len(prompts)), prompts, emitted, sampling)
    for row, prompt in enumerate(prompts):
        scores = scores_by_recomputing(model, prompt, emitted[row].tolist(), sampling, row)
        top = scores.topk(2).values
        # The noise of a float64 model is float64, here rounded once to float32.
        torch.testing.assert_close(seen.gap[row], top[:, 0] - top[:, 1], rtol=0, atol=1e-5)
        chosen = scores.gather(1, emitted[row][:, None])[:, 0]
        torch.testing.assert_close(seen.deficit[row], top[:, 0] - chosen, rtol=0, atol=1e-5)
        assert seen.flipped[row].tolist() == (scores.argmax(-1) != emitted[row]).tolist()


@MODES
@DTYPES
def test_a_faulty_verification_is_found(prompts, sampling, dtype):
    model = tiny_model(dtype=dtype)
    emitted = speculate(model, prompts, sampling, Faulty)
    assert 2 * calibration_of(model, prompts).eps < Faulty.size
    result = certificate_of(model, prompts, emitted, sampling)
    assert 0 < result.flips_outside_near_ties <= result.flips
    assert not result.holds


class Reversed(Transformer):
    """Forwards of several tokens, also those of the calibration, take them in reverse order."""

    def forward(self, tokens, positions, cache):
        return super().forward(tokens.flip(1) if tokens.shape[1] == GAMMA + 1 else tokens, positions, cache)


@DTYPES
def test_a_bound_that_measured_a_bug_is_not_trusted(prompts, dtype):
    """A wrong forward of several tokens widens eps until everything is a near-tie: the flips give it away."""
    model = tiny_model(dtype=dtype)
    assert calibration_of(model, prompts).trusted
    model.__class__ = Reversed
    assert not calibration_of(model, prompts).trusted


def test_one_wrong_token_is_one_flip_because_the_comparison_goes_on_behind_it(prompts):
    model = tiny_model()
    rows = [continue_by_recomputing(model, prompt, N_NEW) for prompt in prompts]
    at = 5
    scores = scores_by_recomputing(model, prompts[1], rows[1], GREEDY, 1)[at]
    prefix = [*rows[1][:at], int(scores.argmin())]
    rows[1] = prefix + continue_by_recomputing(model, prompts[1] + prefix, N_NEW - len(prefix))
    result = certificate_of(model, prompts, torch.tensor(rows), GREEDY)
    assert (result.flips, result.flips_outside_near_ties) == (1, 1)
    assert result.largest_gap_at_flip == pytest.approx(float(scores.max() - scores.min()), abs=1e-9)
    assert result.rows_without_flip == len(prompts) - 1
    assert not result.holds


def test_what_counts_as_a_near_tie_and_as_outside():
    eps = 0.5
    seen = Replay(
        gap=torch.tensor([[0.0, 1.0, 1.1, 0.2], [1.5, 2.0, 3.0, 4.0]]),
        deficit=torch.tensor([[0.0, 1.0, 0.0, 1.2], [0.0, 0.0, 0.0, 0.0]]),
        flipped=torch.tensor([[True, True, False, True], [False] * 4]),
    )
    result = certify(seen, eps)
    assert (result.tokens, result.near_ties, result.near_tie_fraction) == (8, 3, 3 / 8)
    assert result.flips == 3
    assert result.flips_outside_near_ties == 1, "a near-tie of the top two excuses no third token"
    assert result.largest_gap_at_flip == pytest.approx(1.2)
    assert (result.rows, result.rows_without_flip) == (2, 1)
    assert not result.holds
    assert certify(seen, 0.6).holds


class Offset(Transformer):
    """One logit is 0.25 higher in blocks, at one position alone."""

    def forward(self, tokens, positions, cache):
        logits = super().forward(tokens, positions, cache)
        if tokens.shape[1] > 1:
            logits[..., 7] += 0.25 * (positions == LENGTHS[1] + 22)
        return logits


def test_eps_is_the_largest_difference_between_a_block_and_single_tokens(prompts):
    model = tiny_model()
    exact = calibration_of(model, prompts)
    assert exact.eps < 1e-11
    assert (exact.flips, exact.positions) == (0, len(LENGTHS) * N_FORCED)
    model.__class__ = Offset
    measured = calibration_of(model, prompts)
    assert 2 * measured.eps == pytest.approx(0.25, abs=1e-11), "the gap that one logit alone can close"
    assert measured.median < 1e-11
    assert measured.gap_change < 1e-11, "a token that far below the top is no rival"


class Shift(Transformer):
    """Blocks score every token 5 higher, and the reference's choices 0.5 lower than that."""

    def forward(self, tokens, positions, cache):
        logits = super().forward(tokens, positions, cache)
        if tokens.shape[1] > 1:
            logits = (logits + 5).scatter_add(2, logits.argmax(2, keepdim=True), torch.full_like(logits[..., :1], -0.5))
        return logits


class OtherKeys(FullKVCache):
    """Keys of a block are off by up to one in ten thousand, as other kernels would have made them."""

    def write(self, layer, slots, new):
        if slots.shape[1] == GAMMA + 1:
            generator = torch.Generator().manual_seed(layer + int(slots.sum()))
            keys, values = new.unbind(2)
            keys = keys * (1 + 1e-4 * (2 * torch.rand(keys.shape, generator=generator) - 1))
            new = torch.stack((keys, values), dim=2)
        super().write(layer, slots, new)


def test_eps_is_that_of_two_caches_each_written_its_own_way(prompts):
    """As those of speculation and its reference: what the blocks before have stored counts, too."""
    model, lengths = tiny_model(), torch.tensor(LENGTHS)
    cache, forced = OtherKeys(TINY, len(prompts), 128, dtype=torch.int8), forced_text(prompts)

    def logits(width: int) -> Tensor:
        runner = ModelRunner(model, cache)
        for row, prompt in enumerate(prompts):
            runner.prefill_row(row, prompt)
        starts = [lengths[:, None] + torch.arange(start, start + width) for start in range(0, N_FORCED, width)]
        steps = zip(forced.split(width, dim=1), starts, strict=True)
        return torch.cat([runner.step(tokens, positions, cache.capacity) for tokens, positions in steps], dim=1)

    difference = logits(GAMMA + 1) - logits(1)
    largest = ((difference.amax(-1) - difference.amin(-1)) / 2).max()
    assert calibration_of(model, prompts, cache).eps == pytest.approx(float(largest))


class StaleScales(FullKVCache):
    """A slot that is written again keeps the scale of the draft that it held: a bug that needs a rejection."""

    def write(self, layer, slots, new):
        scales = self.scales[layer]
        before = scales[:, self._rows, :, slots]
        super().write(layer, slots, new)
        scales[:, self._rows, :, slots] = torch.where(before > 0, before, scales[:, self._rows, :, slots])


@pytest.mark.parametrize("kv_dtype", LARGEST)
def test_a_wrong_entry_of_8_bits_is_found_and_a_rounded_one_is_not(prompts, kv_dtype):
    model = tiny_model(dtype=torch.float32)

    def cache(kind: type[FullKVCache]) -> FullKVCache:
        return kind(TINY, len(prompts), 128, dtype=kv_dtype)

    calibration = calibration_of(model, prompts, cache(OtherKeys))
    assert calibration.trusted
    for kind, holds in ((FullKVCache, True), (OtherKeys, True), (StaleScales, False)):
        emitted = speculate(model, prompts, GREEDY, cache=cache(kind))
        assert certify(replay(model, cache(FullKVCache), prompts, emitted), calibration.eps).holds == holds


WIDE = replace(TINY, vocab_size=64, dim=64, n_head=2, n_kv_head=1, head_dim=64, ffn_dim=96)


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 weights need VNNI")
@pytest.mark.parametrize("kv_dtype", [torch.float32, *LARGEST])
def test_cpp_attention_and_int8_weights_give_the_same_bits_in_blocks(kv_dtype):
    model, prompts = tiny_model(WIDE, dtype=torch.float32), random_prompts(LENGTHS)
    quantize_linears(model, "int8")
    quantize_head(model)
    model.backend, why = select_backend("auto", "cpu", attention_spec(WIDE, model.dtype), kv_dtype)
    if model.backend.name != "cpp":
        pytest.skip(why)
    for rows in (prompts, prompts[:1]):
        calibration = calibration_of(model, rows, full_cache(model, len(rows), kv_dtype=kv_dtype))
        assert (calibration.eps, calibration.flips, calibration.trusted) == (0, 0, True)
    assert calibration.max_flip_share == MAX_FLIP_SHARE[kv_dtype]


def test_a_shift_of_all_logits_does_not_count(prompts):
    model = tiny_model()
    model.__class__ = Shift
    measured = calibration_of(model, prompts)
    assert 2 * measured.eps == pytest.approx(0.5, abs=1e-11)
    assert measured.gap_change == pytest.approx(0.5, abs=1e-11)
    assert 0 < measured.flips < measured.positions


def test_calibration_leaves_a_cache_that_decodes_as_before(prompts):
    model = tiny_model()
    cache = full_cache(model, len(prompts))
    calibrate(model, cache, prompts, torch.tensor(random_prompts([8] * len(prompts))), GAMMA + 1)
    out = generate(ModelRunner(model, cache), prompts, max_new_tokens=8)
    assert out.tokens == [continue_by_recomputing(model, prompt, 8) for prompt in prompts]


def engine_imports(name: str) -> set[str]:
    """The `engine` modules that a module reaches by imports, itself included."""
    reached, waiting = set(), [name]
    while waiting:
        module = waiting.pop()
        reached.add(module)
        file = ROOT / f"{module.replace('.', '/')}.py"
        file = file if file.is_file() else file.with_suffix("") / "__init__.py"
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            waiting += [found for found in names if found and found.startswith("engine") and found not in reached]
    return reached


def test_the_certificate_reaches_no_speculation_code():
    assert engine_imports("engine.evaluation.certificate") == {
        f"engine.{module}"
        for module in ("evaluation.certificate", "noise", "parallel.all_reduce", "parallel.ranks", "runner", "sampling")
    }
    assert "engine.drafters" in engine_imports("engine.decoding"), "the search finds what is there"
    assert list(inspect.signature(calibrate).parameters) == ["model", "cache", "prompts", "forced", "block"]
    assert list(inspect.signature(replay).parameters) == ["model", "cache", "prompts", "emitted", "sampling"]


def test_logits_that_are_not_finite_certify_nothing():
    model = tiny_model()
    prompts, text = random_prompts(LENGTHS, 60), torch.tensor(random_prompts([8] * len(LENGTHS), 60))
    text[1, 4] = 60
    model.tok_embeddings.weight.data[60] = math.nan
    model.output = torch.nn.Linear(TINY.dim, TINY.vocab_size, bias=False, dtype=torch.float64).requires_grad_(False)
    cache = full_cache(model, len(prompts))
    with pytest.raises(UserError, match=f"calibration.*\n.*row 1, the token at position {LENGTHS[1] + 4}"):
        calibrate(model, cache, prompts, text, GAMMA + 1)
    with pytest.raises(UserError, match=f"reference.*\n.*row 1, the token at position {LENGTHS[1] + 5}"):
        replay(model, cache, prompts, text)


@pytest.mark.parametrize("filtered", [{"top_k": 5}, {"top_p": 0.9}])
def test_filters_are_refused(prompts, filtered):
    model = tiny_model()
    with pytest.raises(ConfigError, match="does not cover filters"):
        replay(model, full_cache(model, 3), prompts, torch.zeros(3, 4).long(), SamplingParams(0.8, **filtered))


# The script.


@pytest.fixture
def paths(checkpoint: Path, books: Path) -> dict[str, object]:
    return {"--model": checkpoint / "model.pth", "--dataset": books}


SIZES = {"--B": 3, "--tokens": 100, "--prefix_len": 60, "--calibration_positions": 30}
SIZES |= {"--gamma": 3, "--streamingllm_budget": 16, "--output": "records.jsonl"}


def flat(arguments: dict[str, object]) -> list[str]:
    return [str(word) for pair in arguments.items() for word in pair]


def run_here(arguments: dict[str, object], cwd: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the script, run in this process."""
    script = ROOT / "reproduce" / "certify.py"
    monkeypatch.setattr(sys, "argv", [str(script), *flat(arguments)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(cwd)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ending:
        assert isinstance(ending.code, int)
        return ending.code
    return 0


def test_the_script_certifies_bfloat16(paths, tmp_path):
    (tmp_path / "records.jsonl").write_text('{"an": "earlier record"}\n')
    command = [sys.executable, str(ROOT / "reproduce" / "certify.py"), *flat(paths | SIZES), "--dtype", "bfloat16"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert any("certificate" in line and line.endswith("holds") for line in lines)
    record = json.loads(last)
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[1]) == record
    asked = {"B": 3, "rows": 3, "prefix_len": 60, "gen_len": 34, "tokens": 102, "gamma": 3, "draft_budget": 16}
    asked |= {"dtype": "bfloat16", "device": "cpu", "verification": "greedy", "temperature": 0.0, "seed": None}
    asked |= {"flips_outside_near_ties": 0, "holds": True, "shortest_prompt": 50, "calibration_positions": 3 * 32}
    assert {key: record[key] for key in asked} == asked
    assert 0 <= record["eps_median"] <= record["eps"] < 0.5
    assert record["flips"] <= record["near_ties"] < record["tokens"] / 2
    assert record["near_tie_fraction"] == pytest.approx(record["near_ties"] / 102, rel=1e-4)
    assert 0 < record["acceptance_rate"] < 1
    assert 0 < record["distinct_4gram_fraction"] <= 1
    assert record["strict_near_tie_fraction"] <= record["near_tie_fraction"]
    assert record["gap_change"] <= 2 * record["eps"]
    assert {"git_commit", "torch_version", "machine", "calibration_flips", "largest_gap_at_flip"} <= set(record)


def test_the_script_certifies_the_coupled_mode(paths, tmp_path, monkeypatch, capsys):
    held_to = []
    monkeypatch.setattr(
        "engine.evaluation.certificate.certify", lambda seen, eps: held_to.append(eps) or certify(seen, eps)
    )
    arguments = paths | SIZES | {"--dtype": "float64", "--temperature": 0.7, "--seed": 3}
    assert run_here(arguments, tmp_path, monkeypatch) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    asked = {"verification": "coupled", "temperature": 0.7, "seed": 3, "near_ties": 0, "flips": 0}
    asked |= {"strict_near_tie_fraction": None, "strict_flips_outside_near_ties": None}
    assert {key: record[key] for key in asked} == asked
    assert 0 < record["eps"] < 1e-11, "digits that count survive the rounding"
    assert held_to == [pytest.approx(record["eps"] / 0.7, rel=1e-4, abs=0)]


@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 weights need VNNI")
def test_the_script_certifies_a_target_in_few_bits(paths, tmp_path, monkeypatch, capsys):
    stored = {"--kv_dtype": "fp8", "--quantize": "int4", "--attention": "torch", "--dtype": "float64"}
    assert run_here(paths | SIZES | stored, tmp_path, monkeypatch) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert any("int4 weights, KV in float8_e4m3fn, torch attention" in line for line in lines)
    asked = {"kv_dtype": "float8_e4m3fn", "quantize": "int4", "attention": "torch", "dtype": "float64", "holds": True}
    asked |= {"draft_kv_dtype": "float8_e4m3fn", "draft_weights": "int4", "calibration_flips": 0, "flips": 0}
    record = json.loads(last)
    assert {key: record[key] for key in asked} == asked


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_the_script_ends_with_code_1_where_the_certificate_fails(paths, tmp_path, monkeypatch, capsys, temperature):
    """The fault is in speculation alone; the record of the failure is kept."""
    monkeypatch.setattr("engine.bench.session.ModelRunner", Faulty)
    arguments = paths | SIZES | {"--dtype": "bfloat16", "--temperature": temperature}
    assert run_here(arguments, tmp_path, monkeypatch) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.endswith("FAILS") for line in lines)
    record = json.loads(last)
    assert record["holds"] is False
    assert record["flips_outside_near_ties"] > 0
    assert json.loads((tmp_path / "records.jsonl").read_text()) == record


BAD_INPUT = {
    "no tokens": ({"--tokens": 0}, ("--tokens", "seen:     0", ">= 1")),
    "negative tokens": ({"--tokens": -5}, ("--tokens", "seen:     -5")),
    "nothing to calibrate with": ({"--calibration_positions": 0}, ("--calibration_positions", ">= 1")),
    "no rows": ({"--B": 0}, ("--B", ">= 1")),
    "nothing speculative": ({"--gamma": 0}, ("--gamma", ">= 1")),
    "prompts too short to differ": ({"--prefix_len": 3}, ("--prefix_len", "seen:     3", ">= 4")),
    "longer than the context": (
        {"--tokens": 600},
        ("60 + 200 + 3 + 1 = 264", "<= 256", "--tokens / --B", "--prefix_len 52 or less"),
    ),
    "unknown dtype": ({"--dtype": "float7"}, ("--dtype", "float7", "bfloat16")),
    "unknown draft dtype": ({"--draft_dtype": "int3"}, ("--draft_dtype", "int3", "same")),
    "unknown device": ({"--device": "tpu"}, ("--device", "tpu")),
    "negative temperature": ({"--temperature": -1}, ("--temperature", "-1")),
    "negative seed": ({"--seed": -1, "--temperature": 1}, ("--seed", "-1")),
    "a seed that nothing is drawn by": ({"--seed": 3}, ("--seed", "3 at temperature 0")),
    "budget without a window": ({"--streamingllm_budget": 4}, ("--draft_budget", "budget 4, n_sink 4")),
    "longer than the text": ({"--prefix_len": 190, "--tokens": 9}, ("3 distinct prompts of 222",)),
    "records in a missing folder": ({"--output": "missing/records.jsonl"}, ("--output", "missing")),
    "random weights": ({"--load_format": "dummy"}, ("--load_format", "dummy", "a trained model")),
    "no such checkpoint": ({"--model": "nowhere/model.pth"}, ("nowhere", "convert_hf_checkpoint.py")),
}


@pytest.mark.parametrize("what", BAD_INPUT)
def test_bad_input_is_refused(what, paths, tmp_path, monkeypatch, capsys):
    bad, says = BAD_INPUT[what]
    assert run_here(paths | SIZES | bad, tmp_path, monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(re.findall(r"^error: \S", printed.err, re.MULTILINE)) == 1
    for part in (*says, "where:", "seen:", "required:", "fix:"):
        assert part in printed.err
    assert list(tmp_path.iterdir()) == []
