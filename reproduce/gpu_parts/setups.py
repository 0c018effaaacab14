"""Set-ups that several cells share: one model over one filled cache, under different drafts and sampling."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.bench.setup import Setup, make_drafter, prepare
from reproduce.paper.variants import under

from engine.bench import arguments, settings
from engine.bench import passes as benchmark
from engine.bench.dummy_prefill import fill_with_noise
from engine.bench.plan import memory_plan, resolve, room
from engine.decoding import GenerateOutput
from engine.timing import PhaseTimer
from models.presets import PRESETS
from reproduce.gpu_parts.cells import Options


def make_setup(options: Options, **flags: Any) -> Setup:
    """`prepare` for the flags of the self-speculation benchmark; on a GPU compiled, and with graphs.

    Of rows that do not fit into memory, as many as do. Errors: OutOfMemoryError if none does.
    """
    parser = arguments.Parser()
    arguments.add_common_arguments(parser)
    arguments.add_sampling_arguments(parser)
    arguments.add_draft_arguments(parser)
    arguments.add_pass_arguments(parser)
    args = parser.parse_args([])
    for name, value in ({"device": options.device, "compile": options.on_cuda} | flags).items():
        assert hasattr(args, name), f"no flag --{name}"
        setattr(args, name, value)
    sampling, draft = settings.sampling_settings(args), settings.draft_settings(args)
    plan = resolve(args, sampling, draft)
    memory = memory_plan(plan)
    args.asked_B = args.B
    args.B = min(args.B, memory.largest_batch(room(plan))) or args.B
    args.planned_bytes = memory.total(args.B)
    return prepare(args, sampling, draft)


def size_record(setup: Setup) -> dict[str, int]:
    """For a record: the rows, those that were asked for, and the bytes that the memory plan has for them."""
    args = setup.args
    return {"B": args.B, "asked_B": args.asked_B, "planned_bytes": args.planned_bytes}


# A model for a CPU and a test, of kinds of layers that quantise.
TINY = "tiny"
TINY_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "vocab_size": 512}
TINY_CONFIG = PRESETS["JackFram/llama-68m"] | TINY_SIZES | {"num_key_value_heads": 1}


def dummy_setup(options: Options, model: str, **flags: Any) -> Setup:
    """Random weights of a published shape, or of TINY_CONFIG, over a cache of random entries."""
    with tempfile.TemporaryDirectory() as folder:
        shape = Path(folder, TINY)
        shape.mkdir()
        (shape / "config.json").write_text(json.dumps(TINY_CONFIG))
        source = {"model": str(shape)} if model == TINY else {"model_name": model}
        setup = make_setup(options, load_format="dummy", **source, **flags)
    fill_with_noise(setup.runner, setup.prompts)
    return setup


@dataclass
class Filled:
    """A set-up over a filled cache, and plain decoding from it in each verification mode that was asked for.

    Each cell starts from the set-up of the one before: it may take over the draft's weights.
    """

    setup: Setup
    prefill_seconds: float = 0.0
    prompts: dict[str, Any] = field(default_factory=dict)
    baselines: dict[str, GenerateOutput] = field(default_factory=dict)

    def passes(self, **flags: Any) -> benchmark.Passes:
        """Under these flags, beside plain decoding one pass of speculation that is timed as a whole, and one whose
        phases are. The drafter's cache and graphs are let go afterwards.
        """
        setup = self.setup = under(self.setup, **flags)
        if setup.sampling.mode not in self.baselines:
            benchmark.warm_up(setup)
            self.baselines[setup.sampling.mode] = benchmark.decode(setup, "baseline")
        drafter = make_drafter(setup, None)
        try:
            benchmark.warm_up(setup, [drafter])
            speculative = benchmark.decode(setup, "speculation", drafter)
            timer = PhaseTimer(setup.runner.device)
            timed = timer, benchmark.decode(setup, "phase times", drafter, timer)
        finally:
            setup.runner.drop_graphs()
        return benchmark.Passes(self.prefill_seconds, self.baselines[setup.sampling.mode], speculative, timed)
