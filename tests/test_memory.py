"""The memory estimate: equal to what is then allocated, exact about the largest batch, itemised when it refuses."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda_linear import cuda_linears
from live_bytes import LiveBytes
from machine import needs_vnni
from memory_plans import BLOCK, BUDGET, CAPACITY, plan_of, run_of, self_draft
from recorded_graph import RecordedGraphs
from tiny import TINY, full_cache, random_prompts, tiny_model
from torch.utils._pytree import tree_leaves

from bench import memory
from bench.auto.rehearsal import Rehearsal
from bench.config import RankOptions, RunConfig, Sizes, Target
from bench.memory import MemoryPlan, require_memory
from bench.plan import resolve_several
from bench.resolved import ResolvedDraft, ResolvedSampling
from common.errors import OutOfMemoryError
from engine import ModelRunner, SelfSpeculation, generate
from engine.drafters.ngram import NGram, NGramConfig
from engine.drafters.self_speculation import SelfConfig
from engine.drafters.speculated import Speculated
from engine.modes import Coupled
from engine.noise import blocks_per_pass
from engine.pacing import PLAIN, Choice
from engine.sampling import SamplingParams
from kv_cache import FullKVCache, StreamingKVCache
from kv_cache.full import Full
from kv_cache.retrieval import Retrieval
from kv_cache.snapkv import SnapKV
from kv_cache.streaming import Streaming
from kv_cache.verify_topk import VerifyTopK
from models import ModelConfig, load_model
from models.packed_linear import PackedLinear
from models.quantize import DEQUANTIZING_BYTES, INT8_OUTPUT_BYTES, Int8Linear, dequantize

CONFIGS = {
    "untied": TINY,
    "tied": replace(TINY, tie_embeddings=True),
    "bias": replace(TINY, qkv_bias=True),
    "given head_dim": replace(TINY, head_dim=16, n_kv_head=1),
}


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
    # Of one size, the policy whose cache takes most: here with the means of a long text's keys.
    of_size = [SelfConfig(gamma=1, policy=policy) for policy in (VerifyTopK(40, 8), Retrieval(40, 8), SnapKV(40, 8))]
    for drafts in (of_size, of_size[::-1]):
        for at_once in ("one of each budget", "one"):
            (planned,) = resolve_several(config, drafts, at_once).draft.policies
            assert planned.name == "retrieval"


@pytest.mark.parametrize("n_inner", [0, 2])
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection"])
def test_outputs_that_graphs_keep_are_planned_for(mode: str, n_inner: int) -> None:
    """Two budgets, three gammas, plain rounds and the baseline's, for two rows and one: all but one longest round's.
    Each drafts by itself or by an inner draft."""
    kept: list[Any] = []

    class Keeping(RecordedGraphs):
        def capture(self, part: Any) -> Any:
            replay, outputs = super().capture(part)
            kept.append(outputs)
            return replay, outputs

    model = tiny_model(dtype=torch.float32)
    runner = ModelRunner(model, full_cache(model, 2), new_graphs=Keeping)
    budgets = (16, 12)
    drafters: list[Any] = [SelfSpeculation(runner, StreamingKVCache(TINY, 2, budget, 2), gamma=3) for budget in budgets]
    if n_inner:
        drafters = [Speculated(one, NGram(runner, n_inner)) for one in drafters]
    choices = [PLAIN, *(Choice(index, gamma) for index in range(2) for gamma in (1, 2, 3))]
    sampling = ResolvedSampling(SamplingParams(0.0 if mode == "greedy" else 0.7, seed=1), mode)
    how: dict[str, Any] = {"max_new_tokens": 60, "sampling": sampling.params, "verification": mode}
    for n_rows in (1, 2):
        prompts = random_prompts([9, 14][:n_rows])
        generate(runner, prompts, **how)
        Rehearsal(runner, drafters, prompts, gamma=3, **how).run(choices, 2)
    inner = ResolvedDraft(NGramConfig(), n_inner) if n_inner else None
    draft = ResolvedDraft(SelfConfig(), 3, True, tuple(map(Streaming, budgets)), budgets, inner=inner)
    on_cuda = {"n_rows": 2, "draft": draft, "device": "cuda", "sampling": sampling}
    plan, called = (plan_of(TINY, config=RunConfig(Target(no_cuda_graphs=off)), **on_cuda) for off in (False, True))
    assert plan.total(2) - called.total(2) == 2 * plan.per_row["outputs of captured rounds"] > 0
    of_inner = (n_inner and n_inner + 1) if mode == "rejection" else 0
    longest = (4 + {"greedy": 0, "coupled": 4, "rejection": 3}[mode] + of_inner) * TINY.vocab_size * 4
    without = plan_of(TINY, **on_cuda | {"draft": replace(draft, inner=None)}).per_row["logits"]
    assert plan.per_row["logits"] - without == of_inner * TINY.vocab_size * 4
    leaves = tree_leaves(kept)
    leaves += [leaf._drawn_with for leaf in leaves if isinstance(leaf, Coupled)]
    wide = [x for x in leaves if isinstance(x, torch.Tensor) and x.shape[-1] == TINY.vocab_size]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in wide}
    assert sum(held.values()) == 2 * (plan.per_row["outputs of captured rounds"] + longest)
    for changes in ({"device": "cpu"}, {"config": RunConfig(Target(no_cuda_graphs=True))}):
        assert memory.captured_rows(run_of(TINY, **on_cuda | changes)) == 0
    # Where entries are not chosen after every round, rounds that note what they attend to are captured apart.
    policies = (Streaming(16), VerifyTopK(16, 4), VerifyTopK(16, 4, refresh=2))
    drafts = (ResolvedDraft(SelfConfig(), 3, True, (policy,), (16,)) for policy in policies)
    other, always, at_times = (memory.captured_rows(run_of(TINY, **on_cuda | {"draft": draft})) for draft in drafts)
    assert other == always < at_times


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
