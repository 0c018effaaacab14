"""The memory estimate: equal to what is then allocated, exact about the largest batch, itemised when it refuses."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda_linear import cuda_linears
from live_bytes import LiveBytes
from machine import needs_vnni
from recorded_graph import RecordedGraphs
from tiny import TINY, full_cache, random_prompts, tiny_model
from torch.utils._pytree import tree_leaves

from common.errors import OutOfMemoryError
from engine import ModelRunner, SelfSpeculation, generate
from engine.bench import memory
from engine.bench.config import RankOptions, RunConfig, Sizes, Target
from engine.bench.memory import Footprint, MemoryPlan, plan_memory, require_memory
from engine.bench.plan import resolve_several
from engine.bench.resolved import ResolvedDraft, ResolvedSampling
from engine.cost_model.rehearsal import Rehearsal
from engine.drafters import SelfConfig
from engine.noise import blocks_per_pass
from engine.pacing import PLAIN, Choice
from engine.sampling import SamplingParams
from kv_cache import Full, FullKVCache, QuantizedKVCache, SnapKV, Streaming, StreamingKVCache, VerifyTopK
from models import ModelConfig, load_model
from models.packed_linear import PackedLinear
from models.quantize import DEQUANTIZING_BYTES, INT8_OUTPUT_BYTES, Int8Linear, dequantize

CAPACITY, BUDGET, BLOCK = 96, 20, 4
GREEDY = ResolvedSampling(SamplingParams(), "greedy")
CONFIGS = {
    "untied": TINY,
    "tied": replace(TINY, tie_embeddings=True),
    "bias": replace(TINY, qkv_bias=True),
    "given head_dim": replace(TINY, head_dim=16, n_kv_head=1),
}


def self_draft(config: ModelConfig, dtype: torch.dtype = torch.float32, **changes: Any) -> Footprint:
    """A draft that is the target over a small cache."""
    cache = StreamingKVCache(config, 1, BUDGET, device="meta", dtype=changes.pop("kv_dtype", None) or dtype)
    return Footprint(config, dtype, **{"caches": (cache,), "shares_weights": True, "prefills": False} | changes)


def plan_of(config: ModelConfig, dtype: torch.dtype = torch.float32, /, **changes: Any) -> MemoryPlan:
    """Of that target, and of a self-draft unless another is given; changes: of its footprint, or of the run."""
    stored = {name: changes.pop(name) for name in ("quantize", "dequantizes") if name in changes}
    cache = FullKVCache(config, 1, CAPACITY, "meta", changes.pop("kv_dtype", None) or dtype)
    draft = changes.pop("footprint", self_draft(config, dtype))
    drafts = [draft] if draft else []
    return plan_memory(run_of(config, **changes), Footprint(config, dtype, (cache,), **stored), *drafts)


def run_of(config: ModelConfig, /, **changes: Any) -> Any:
    """What of a run its memory depends on, beside its models."""
    run = {"target": SimpleNamespace(config=config), "draft": None, "gamma": BLOCK - 1, "sampling": GREEDY}
    run |= {"config": RunConfig(), "device": "cpu", "n_rows": 1, "capacity": CAPACITY, "group": (0,), "draft_group": ()}
    return SimpleNamespace(**run | changes)


def loaded_bytes(config: ModelConfig, dtype: torch.dtype, prepack: bool) -> int:
    model = load_model("none", load_format="dummy", config=config, dtype=dtype, prepack=prepack)
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    tensors = [*model.parameters(), *(tensor for module in packed for tensor in (module.weight, module.bias))]
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_and_kv_are_what_models_and_caches_hold(name: str, dtype: torch.dtype) -> None:
    """Entries of 8 bits with their scales."""
    config, plan = CONFIGS[name], plan_of(CONFIGS[name], dtype)
    assert config.n_parameters * dtype.itemsize == loaded_bytes(config, dtype, prepack=False)
    packed = loaded_bytes(config, dtype, prepack=True)
    assert plan.fixed["weights"] == packed or (plan.fixed["weights"] > packed and dtype != torch.float32)
    for entries in (None, torch.int8, torch.float8_e4m3fn):
        plan = plan_of(config, dtype, kv_dtype=entries, footprint=self_draft(config, dtype, kv_dtype=entries))
        assert 3 * plan.per_row["target KV"] == FullKVCache(config, 3, CAPACITY, dtype=entries or dtype).n_bytes
        assert 3 * plan.per_row["draft KV"] == StreamingKVCache(config, 3, BUDGET, dtype=entries or dtype).n_bytes


def test_sampling_and_filters_take_memory_of_their_own() -> None:
    """By the logit: distributions and noise; sorted values and masses on top where a filter sorts."""
    logits = BLOCK * TINY.vocab_size
    each = (SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, top_p=0.9))
    greedy, sampled, filtered = (plan_of(TINY, sampling=ResolvedSampling(one, "auto")) for one in each)
    assert greedy == plan_of(TINY)
    assert sampled.per_row["logits"] - greedy.per_row["logits"] >= logits * (4 * 4 + 4 + 8)
    assert filtered.per_row["logits"] - sampled.per_row["logits"] >= logits * (4 + 8 + 3 * 8)
    assert sampled.fixed["activations"] - greedy.fixed["activations"] >= blocks_per_pass(torch.device("cpu")) * 4 * 8


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_largest_batch_is_exact(batch: int) -> None:
    plan = plan_of(TINY)
    for available in (plan.total(batch), plan.total(batch + 1) - 1):
        assert plan.largest_batch(available) == batch
        require_memory(plan, batch, available, "cpu")
        with pytest.raises(OutOfMemoryError, match=f"--B {batch}, the largest batch that fits"):
            require_memory(plan, batch + 1, available, "cpu")


def test_the_refusal_is_itemised_and_adds_up() -> None:
    gib = 2**30
    per_row = {"target KV": 2 * gib, "draft KV": gib, "logits": gib // 2}
    plan = MemoryPlan({"weights": 6 * gib, "activations": gib}, per_row)
    with pytest.raises(OutOfMemoryError) as refusal:
        require_memory(plan, 4, 12 * gib, "cuda:1")
    message = str(refusal.value)
    items = re.findall(r"([a-zA-Z][a-zA-Z ]+) (\d+\.\d\d) GiB[,\n]", message.partition("cuda:1:")[2])
    sizes = {"weights": 6.0, "target KV": 8.0, "draft KV": 4.0, "logits": 2.0, "activations": 1.0}
    assert {name: float(size) for name, size in items} == sizes
    assert 2**20 < memory.available_bytes("cpu") < 2**50
    for part in ("21.00 GiB for a batch of 4", "<= 12.00 GiB available", "use --B 1, the largest batch that fits"):
        assert part in message


@pytest.mark.parametrize("scheme", [pytest.param("int8", marks=needs_vnni), "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_quantised_weights_are_counted_as_they_are_stored(scheme: str, tied: bool) -> None:
    config = replace(
        TINY, dim=512, n_head=8, n_kv_head=2, head_dim=64, ffn_dim=768, vocab_size=1024, tie_embeddings=tied
    )
    planned = plan_of(config, quantize=scheme, footprint=None).fixed["weights"]
    model = load_model("none", load_format="dummy", config=config, quantize=scheme)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    assert held == pytest.approx(planned, rel=0.02)
    assert planned < plan_of(config, footprint=None).fixed["weights"]


def always(n_token: int) -> bool:
    return True


def longer_blocks(n_token: int) -> bool:
    return n_token > BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "kind,stored,slack",
    [
        *((FullKVCache, stored, 1) for stored in (torch.int8, torch.float8_e4m3fn)),
        *((QuantizedKVCache, stored, 1.3) for stored in (torch.float32, torch.bfloat16, torch.int8)),
    ],
)
def test_entries_that_attention_cannot_read_are_counted_as_they_are_turned_into_others(kind, stored, slack, dtype):
    """Of all rows; fewer of them take less."""
    cache, of_row = kind(TINY, 3, 700, dtype=stored), kind(TINY, 1, 700, device="meta", dtype=stored)
    planned = 3 * Footprint(TINY, dtype, (of_row,), dequantizes=always).dequantized(1)
    peaks = []
    for rows in (slice(None), torch.tensor([2, 0])):
        view = cache.view(rows)
        with LiveBytes() as live:
            view.read(0).dequantized(dtype)
        peaks.append(live.peak)
    assert peaks[1] < peaks[0] <= planned <= slack * peaks[0]


def test_blocks_that_attention_reads_take_no_memory_beyond_what_a_chunk_of_one_row_takes() -> None:
    each = ((None, BLOCK), (always, BLOCK), (longer_blocks, BLOCK), (longer_blocks, BLOCK + 1))
    read, all_rows, one_row, longer = (
        plan_of(TINY, kv_dtype=torch.int8, dequantizes=dequantizes, gamma=block - 1) for dequantizes, block in each
    )
    assert plan_of(TINY, kv_dtype=torch.int8, dequantizes=lambda n_token: False) == read
    assert read.per_row["dequantised KV"] == one_row.per_row["dequantised KV"] == 0
    assert longer.per_row["dequantised KV"] == all_rows.per_row["dequantised KV"] > 0
    assert longer.fixed["activations"] == all_rows.fixed["activations"] == read.fixed["activations"]
    assert one_row.fixed["activations"] == read.fixed["activations"] + all_rows.per_row["dequantised KV"]


def test_a_draft_dequantises_its_own_entries_when_the_target_does_not() -> None:
    """Steps of all rows, and where it runs prompts chunks of one; SnapKV's runs them over the whole context."""
    own = self_draft(TINY, kv_dtype=torch.int8, dequantizes=always)
    chunks_only = replace(own, dequantizes=longer_blocks)
    prefills = replace(chunks_only, prefills=True)
    read, of_target = (plan_of(TINY, dequantizes=dequantizes, footprint=None) for dequantizes in (None, always))
    of_draft = of_target.per_row["dequantised KV"] * BUDGET // CAPACITY
    assert plan_of(TINY, footprint=own).per_row["dequantised KV"] == of_draft > 0
    both = plan_of(TINY, footprint=own, dequantizes=always)
    assert both.per_row["dequantised KV"] == of_target.per_row["dequantised KV"]
    assert plan_of(TINY, footprint=own, dequantizes=longer_blocks).fixed["activations"] == (
        read.fixed["activations"] + of_target.per_row["dequantised KV"] - of_draft
    )
    for draft, chunk in ((own, 0), (chunks_only, 0), (prefills, of_draft)):
        assert plan_of(TINY, footprint=draft).fixed["activations"] == read.fixed["activations"] + chunk
    observing = replace(prefills, caches=(SnapKV(BUDGET, 6).new_cache(TINY, 1, 0, "meta", torch.int8),))
    selects, reads = (plan_of(TINY, footprint=replace(observing, dequantizes=d)) for d in (longer_blocks, None))
    assert selects.fixed["activations"] == reads.fixed["activations"] + of_target.per_row["dequantised KV"]
    # What verification chooses takes scores and keys of a layer.
    chooses = plan_of(
        TINY, footprint=replace(own, caches=(VerifyTopK(BUDGET, 6).new_cache(TINY, 1, 0, "meta", torch.float32),))
    )
    assert chooses.per_row["dequantised KV"] == CAPACITY * (12 * BLOCK * TINY.n_head + 4 * 2 * 8) > of_draft
    # Of several budgets' caches one is read at a time, but all are held.
    caches = (StreamingKVCache(TINY, 1, n, 4, "meta", torch.int8) for n in (BUDGET, BUDGET // 2, BUDGET // 2))
    several = plan_of(TINY, footprint=replace(own, caches=tuple(caches)))
    assert several.per_row["dequantised KV"] == of_draft
    assert several.per_row["draft KV"] == 2 * plan_of(TINY, footprint=own).per_row["draft KV"]


def test_unpacking_is_planned_whatever_cache_stands_beside() -> None:
    caches = QuantizedKVCache(TINY, 1, 700, device="meta"), StreamingKVCache(TINY, 1, 40, 4, "meta")
    alone, *both = (Footprint(TINY, torch.float32, each).dequantized(1) for each in (caches[:1], caches, caches[::-1]))
    assert both == [alone] * 2 and alone > 0


@pytest.mark.parametrize("dtype,size", [(torch.bfloat16, 2), (torch.float32, 4), (torch.float64, 8)])
def test_logits_are_planned_in_float32_at_least_beside_what_the_head_gives(dtype: torch.dtype, size: int) -> None:
    assert plan_of(TINY, dtype).per_row["logits"] == BLOCK * TINY.vocab_size * (size + max(4, size))


def test_on_a_gpu_libraries_and_every_communicator_take_memory_of_their_own() -> None:
    """The target's ranks, those of its draft where these are others, and those of all replicas."""
    two_groups = {"group": (0, 1, 2), "draft_group": (0, 1)}
    replicas = {"config": RunConfig(ranks=RankOptions(data_parallel=2)), "group": (0, 1), "draft_group": (0, 1)}
    each: Any = (("cpu", two_groups), ("cuda:0", {}), ("cuda:0", two_groups))
    on_cpu, alone, two = (plan_of(TINY, device=device, **groups) for device, groups in each)
    assert plan_of(TINY, device="cuda:0", **replicas) == two
    assert on_cpu.fixed["CUDA and NCCL"] == 0 and alone.fixed["CUDA and NCCL"] == memory.CUDA_BYTES
    assert two.total(3) - alone.total(3) == 2 * memory.NCCL_BYTES
    with pytest.raises(OutOfMemoryError, match=r"CUDA and NCCL 3\.98 GiB"):
        require_memory(two, 1, 0, "cuda:0")


def test_dequantising_a_layer_in_4_bits_is_planned_for_on_a_gpu() -> None:
    """As much as it holds at once, of the largest layer of target or draft."""
    largest = 2 * TINY.ffn_dim * TINY.dim
    packed, scales = torch.zeros(8, 2, 32, 2, dtype=torch.int32), torch.zeros(4, 64, 2, dtype=torch.bfloat16)
    with LiveBytes() as live:
        dequantize(packed, scales)
    assert live.peak == DEQUANTIZING_BYTES * 64 * 128
    draft = self_draft(TINY, torch.bfloat16, shares_weights=False, quantize="int4")
    plain = plan_of(TINY, device="cuda").fixed["activations"]
    for quantised in (plan_of(TINY, device="cuda", quantize="int4"), plan_of(TINY, device="cuda", footprint=draft)):
        assert quantised.fixed["activations"] - plain == DEQUANTIZING_BYTES * largest
    assert plan_of(TINY, quantize="int4").fixed["activations"] == plain


def test_what_a_layer_in_8_bits_gives_is_planned_for_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt's chunk in the widest layer, and of the head in both schemes."""
    with cuda_linears(monkeypatch), LiveBytes() as live:
        layer, x = Int8Linear(torch.ones(4096, 8), None), torch.ones(64, 8)
        before = live.peak = live._live
        layer(x)
    assert live.peak - before == pytest.approx(64 * 4096 * INT8_OUTPUT_BYTES, rel=0.01)
    plain, int8, int4 = (plan_of(TINY, quantize=scheme) for scheme in (None, "int8", "int4"))
    assert int8.fixed["activations"] - plain.fixed["activations"] == CAPACITY * 2 * TINY.ffn_dim * INT8_OUTPUT_BYTES
    head = BLOCK * TINY.vocab_size * (INT8_OUTPUT_BYTES - 4)
    assert int8.per_row["logits"] - plain.per_row["logits"] == int4.per_row["logits"] - plain.per_row["logits"] == head


def test_selecting_entries_is_planned_for() -> None:
    """Scores of the observed queries over a whole context, keys in order, and a draft's whole prompt."""
    plain = plan_of(TINY).fixed["activations"]
    of_target = self_draft(TINY, caches=(SnapKV(BUDGET, 6).new_cache(TINY, 1, 0, "meta", torch.float32),))
    own = replace(of_target, shares_weights=False, prefills=True)
    scores = 4 * 6 * TINY.n_head * CAPACITY
    keys = 4 * TINY.n_kv_head * TINY.head_dim * CAPACITY
    needed, with_prompt = (plan_of(TINY, footprint=draft).fixed["activations"] - plain for draft in (of_target, own))
    assert needed >= 2 * scores + keys
    assert with_prompt == needed + FullKVCache(TINY, 1, CAPACITY).n_bytes


def test_of_several_drafts_there_is_room_for_as_many_as_are_held_at_once() -> None:
    policies = (Streaming(40), Full(), Streaming(16), Streaming(40))
    drafts = [SelfConfig(gamma=gamma, policy=policy) for gamma, policy in zip((2, 1, 3, 1), policies, strict=True)]
    config = RunConfig(Target(model_name="meta-llama/Llama-2-7b-hf", load_format="dummy"), sizes=Sizes(2, 200, 8))
    of_all, of_budgets, of_one = (
        resolve_several(config, drafts, at_once).draft for at_once in ("all", "one of each budget", "one")
    )
    assert of_all.capacities == (210, 40, 40, 16) and of_budgets.capacities == (210, 40, 16)
    assert of_one.capacities == (210,) and not of_one.automatic
    assert of_all.gamma == of_budgets.gamma == of_one.gamma == 3


@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_outputs_that_graphs_keep_are_planned_for(mode: str) -> None:
    """Two budgets, three gammas, plain rounds and the baseline's, for two rows and one: all but one longest round's."""
    kept: list[Any] = []

    class Keeping(RecordedGraphs):
        def capture(self, part: Any) -> Any:
            replay, outputs = super().capture(part)
            kept.append(outputs)
            return replay, outputs

    model = tiny_model(dtype=torch.float32)
    runner = ModelRunner(model, full_cache(model, 2), new_graphs=Keeping)
    budgets = (16, 12)
    drafters = [SelfSpeculation(runner, StreamingKVCache(TINY, 2, budget, 2), gamma=3) for budget in budgets]
    choices = [PLAIN, *(Choice(index, gamma) for index in range(2) for gamma in (1, 2, 3))]
    sampling = ResolvedSampling(SamplingParams(0.0 if mode == "greedy" else 0.7, seed=1), mode)
    how: dict[str, Any] = {"max_new_tokens": 60, "sampling": sampling.params, "verification": mode}
    for n_rows in (1, 2):
        prompts = random_prompts([9, 14][:n_rows])
        generate(runner, prompts, **how)
        Rehearsal(runner, drafters, prompts, gamma=3, **how).run(choices, 2)
    draft = ResolvedDraft(SelfConfig(), 3, True, tuple(map(Streaming, budgets)), budgets)
    on_cuda = {"n_rows": 2, "draft": draft, "device": "cuda", "sampling": sampling}
    plan, called = (plan_of(TINY, config=RunConfig(Target(no_cuda_graphs=off)), **on_cuda) for off in (False, True))
    assert plan.total(2) - called.total(2) == 2 * plan.per_row["outputs of captured rounds"] > 0
    longest = (4 + (3 if mode == "rejection" else 0)) * TINY.vocab_size * 4
    held = [x for x in tree_leaves(kept) if isinstance(x, torch.Tensor) and x.shape[-1] == TINY.vocab_size]
    assert sum(x.numel() * 4 for x in held) == 2 * (plan.per_row["outputs of captured rounds"] + longest)
    for changes in ({"device": "cpu"}, {"config": RunConfig(Target(no_cuda_graphs=True))}):
        assert memory.captured_rows(run_of(TINY, **on_cuda | changes)) == 0


def test_the_least_that_a_container_and_those_around_it_leave(tmp_path: Path) -> None:
    def group(path: str, limit: str, used: int, of_files: int) -> None:
        folder = tmp_path / path
        folder.mkdir(parents=True, exist_ok=True)
        stat = f"anon 7\nactive_anon 5\nactive_file 3\ninactive_file {of_files - 3}"
        for name, text in (("max", limit), ("current", used), ("stat", stat)):
            (folder / f"memory.{name}").write_text(f"{text}\n")

    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/other\n0::/job/step\n")
    assert memory.left_in_container(tmp_path, own) == memory.left_in_container(tmp_path, tmp_path / "none") == math.inf
    group("job/step", "max", 900, 10)
    group("job", "1000", 700, 50)
    assert memory.left_in_container(tmp_path, own) == 1000 - 700 + 50
    group("job/step", "300", 200, 3)
    assert memory.left_in_container(tmp_path, own) == 103
