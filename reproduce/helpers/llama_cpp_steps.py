"""Time steps of llama.cpp's batched decoding for cpu_storages.py, in an interpreter that has llama-cpp-python.

The first line of standard input is a JSON object: "model" (a GGUF file), "prompt" (token ids), "rows", "room" (tokens
behind the prompt), "threads", and "entries" (f16 or q8_0). Every row holds the prompt in cells of its own. Each further
line is {"tokens": T, "steps": N}: N steps that append T tokens to every row, which are forgotten afterwards. Every line
is answered by a JSON object on standard output.
"""

import ctypes
import json
import sys
import time

import llama_cpp as api
import numpy as np

ENTRIES = {"f16": api.GGML_TYPE_F16, "q8_0": api.GGML_TYPE_Q8_0}
N_BATCH = 512


class Rows:
    """A context in which every row holds the prompt, set up as it decodes fastest: the cells of rows are apart, and
    entries in f16 take no flash attention (which is no faster for one token a row, and slower for four); those in q8_0
    need it."""

    def __init__(self, model: str, prompt: list[int], rows: int, room: int, threads: int, entries: str) -> None:
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        self.n_rows, self.n_prompt = rows, len(prompt)
        self.n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        params = api.llama_context_default_params()
        params.n_ctx = rows * -(-(len(prompt) + room) // 256) * 256
        params.n_batch = params.n_ubatch = max(N_BATCH, 8 * rows)
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = ENTRIES[entries]
        params.flash_attn_type = entries != "f16"
        params.kv_unified = False
        self.context = api.llama_init_from_model(self.model, params)
        assert self.context, "there is no context of this size"
        self.memory = api.llama_get_memory(self.context)
        self.batch = api.llama_batch_init(params.n_batch, 0, 1)
        started = time.perf_counter()
        for first in range(0, len(prompt), N_BATCH):
            chunk = prompt[first : first + N_BATCH]
            self.decode([(token, first + i, 0, first + i == len(prompt) - 1) for i, token in enumerate(chunk)])
        self.prefill_seconds = time.perf_counter() - started
        # Prefilling the other rows would write the same numbers: their cells are filled with a copy of the first's.
        n_bytes = api.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * n_bytes)()
        assert api.llama_state_seq_get_data(self.context, state, n_bytes, 0) == n_bytes
        for row in range(1, rows):
            assert api.llama_state_seq_set_data(self.context, state, n_bytes, row) == n_bytes

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> float:
        """Run tokens, each with its position, its row, and whether its logits are needed; return the seconds."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, row, has_logits) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, has_logits
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, row
        started = time.perf_counter()
        code = api.llama_decode(self.context, batch)
        api.llama_synchronize(self.context)
        seconds = time.perf_counter() - started
        assert code == 0, f"llama_decode gave {code}"
        return seconds

    def steps(self, tokens: int, steps: int) -> list[float]:
        """Milliseconds of steps of so many tokens a row. A row goes on with the most probable token of its last one."""
        times, current = [], [0] * self.n_rows
        for first in range(self.n_prompt, self.n_prompt + tokens * steps, tokens):
            block = [(current[row], first + i, row, True) for row in range(self.n_rows) for i in range(tokens)]
            times.append(1e3 * self.decode(block))
            for row in range(self.n_rows):
                logits = api.llama_get_logits_ith(self.context, (row + 1) * tokens - 1)
                current[row] = int(np.ctypeslib.as_array(logits, (self.n_vocab,)).argmax())
        for row in range(self.n_rows):
            api.llama_memory_seq_rm(self.memory, row, self.n_prompt, -1)
        return times


def main() -> None:
    rows = Rows(**json.loads(sys.stdin.readline()))
    version = {"llama_cpp_python": api.__version__, "system": api.llama_print_system_info().decode()}
    print(json.dumps({"row_prefill_seconds": rows.prefill_seconds} | version), flush=True)
    for line in sys.stdin:
        print(json.dumps({"ms": rows.steps(**json.loads(line))}), flush=True)


if __name__ == "__main__":
    main()
