"""llama.cpp's batched decoding of the same GGUF, by the package llama-cpp-python, as a contender."""

import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from common.errors import flag, refuse
from common.say import say
from reproduce.helpers.batches import Batch
from reproduce.helpers.records import Record

# Types of entries; tokens of a prefill's chunk; steps of a run.
ENTRIES, N_BATCH, STEPS = {"f16": "GGML_TYPE_F16", "q8_0": "GGML_TYPE_Q8_0"}, 512, 16


@cache  # the same for the same arguments
class LlamaRows:
    """A context in which every row holds the prompt in separate cells, and has room for STEPS steps of `width` tokens.

    entries: f16 or q8_0. Entries in f16 are set up without flash attention, which is no faster for one token a row and
    slower for four; q8_0 needs it."""

    def __init__(self, gguf: str, prompt: Sequence[int], rows: int, width: int, threads: int, entries: str) -> None:
        self.api = api = import_module("llama_cpp")
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(gguf.encode(), api.llama_model_default_params())
        self.n_rows, self.n_prompt = rows, len(prompt)
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        params = api.llama_context_default_params()
        params.n_ctx = rows * -(-(len(prompt) + STEPS * width) // 256) * 256
        params.n_batch = params.n_ubatch = max(N_BATCH, width * rows)
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = getattr(api, ENTRIES[entries])
        params.flash_attn_type = entries != "f16"
        params.kv_unified = False
        self.context = api.llama_init_from_model(self.model, params)
        assert self.context, "there is no context of this size"
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(params.n_batch, 0, 1)
        for first in range(0, len(prompt), N_BATCH):
            chunk = prompt[first : first + N_BATCH]
            self.decode([(token, first + i, 0, first + i == len(prompt) - 1) for i, token in enumerate(chunk)])
        # Prefilling the other rows would write the same numbers: their cells are filled with a copy of the first's.
        n_bytes = api.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * n_bytes)()
        assert api.llama_state_seq_get_data(self.context, state, n_bytes, 0) == n_bytes
        for row in range(1, rows):
            assert api.llama_state_seq_set_data(self.context, state, n_bytes, row) == n_bytes

    def decode(self, tokens: Sequence[tuple[int, int, int, bool]]) -> float:
        """Run tokens, each with its position, its row, and whether its logits are needed; return the seconds."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, has_logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, has_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        started = time.perf_counter()
        code = self.api.llama_decode(self.context, batch)
        self.api.llama_synchronize(self.context)
        seconds = time.perf_counter() - started
        assert code == 0, f"llama_decode gave {code}"
        return seconds

    def steps(self, n_token: int, n_steps: int) -> list[float]:
        """Return the milliseconds of steps that append `n_token` tokens to every row, beginning with the most probable
        next token, and forget them afterwards."""
        times, current = [], [0] * self.n_rows
        for first in range(self.n_prompt, self.n_prompt + n_token * n_steps, n_token):
            block = [(current[row], first + i, row, True) for row in range(self.n_rows) for i in range(n_token)]
            times.append(1e3 * self.decode(block))
            for row in range(self.n_rows):
                logits = self.api.llama_get_logits_ith(self.context, (row + 1) * n_token - 1)
                current[row] = int(np.ctypeslib.as_array(logits, (self.n_vocab,)).argmax())
        for row in range(self.n_rows):
            self.api.llama_memory_seq_rm(self.memory, row, self.n_prompt, -1)
        return times


def step_ms(gguf: str, prompt: tuple[int, ...], n_rows: int, width: int, *how: Any) -> tuple[list[float], list[float]]:
    """Return the ms of plain steps and of verifications of `width` tokens. how: further arguments of `LlamaRows`."""
    rows = LlamaRows(gguf, prompt, n_rows, width, *how)
    return rows.steps(1, STEPS), rows.steps(width, STEPS)


def new_process() -> Executor:
    """Return a process for llama.cpp, which ends it with an illegal instruction on some virtual machines."""
    return ProcessPoolExecutor(1, get_context("spawn"))


class Peer:
    """Plain steps and verifications of `gamma` drafts after the first prompt of a batch, in every row."""

    needs_plain = False

    def __init__(self, gguf: Path, entries: str, n_rows: int, gamma: int) -> None:
        self._gguf, self._entries, self._n_rows, self._gamma = gguf, entries, n_rows, gamma
        self._process, self._prompt, self._is_dead = new_process(), tuple[int, ...](), False
        self._plain_ms, self._verify_ms = list[float](), list[float]()

    def __str__(self) -> str:
        return f"llama.cpp, {self._gguf.stem.rpartition('.')[2]}, {self._entries}"

    def run(self, batch: Batch, repeat: int) -> None:
        if self._is_dead:
            return
        self._prompt = self._prompt or tuple(batch.prompts[0])
        sizes = str(self._gguf), self._prompt, self._n_rows, 1 + self._gamma, torch.get_num_threads(), self._entries
        try:
            plain_ms, verify_ms = self._process.submit(step_ms, *sizes).result()
        except BrokenExecutor:
            self._is_dead = True
            say(f"note: {self} ended its process, and is left out: it may use instructions that this machine lacks")
            return
        self._plain_ms += plain_ms
        self._verify_ms += verify_ms

    def row(self) -> Record:
        """Return median times, which leave out sampling and the host; None where the process died."""
        plain_ms, verify_ms = (median(ms) if ms else None for ms in (self._plain_ms, self._verify_ms))
        rate = plain_ms and 1e3 * self._n_rows / plain_ms
        return {"baseline_step_ms": plain_ms, "baseline_tokens_per_second": rate, "verify_step_ms": verify_ms}


def peers(model: str, n_rows: int, gammas: Sequence[int | str]) -> list[Peer]:
    """Return llama.cpp with each type of entries, for a model with a GGUF in its folder. Errors: ConfigError."""
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    if (gguf := next(folder.glob("*.gguf"), None)) is None:
        refuse("model", folder, "a folder with a GGUF", "llama.cpp reads a GGUF", f"leave out {flag('llama_cpp')}")
    try:
        import_module("llama_cpp")
    except ImportError as error:
        fix = "pip install llama-cpp-python==0.3.36"
        refuse("llama_cpp", error, "the package llama-cpp-python", "llama.cpp does not run", fix)
    gamma = max((int(gamma) for gamma in gammas if gamma != "auto"), default=3)
    return [Peer(gguf, entries, n_rows, gamma) for entries in ENTRIES]
