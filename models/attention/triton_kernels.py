"""Triton kernels: attention of a few query tokens over a part of a row's slots, the merge of the parts, and the shares
of attention that chunks of entries get."""

import triton
import triton.language as tl

# A position that no query reaches.
UNSEEN = tl.constexpr(2**31 - 1)


@triton.jit
def _dequantized(codes, low_at, step_at, exists):
    """Return codes of 4 bits as float32 numbers. low_at, step_at: pointers to their grids, which broadcast to them."""
    low = tl.load(low_at, mask=exists, other=0.0).to(tl.float32)
    return codes.to(tl.float32) * tl.load(step_at, mask=exists, other=0.0).to(tl.float32) + low


@triton.jit
def _unpacked_tile(
    slot, stop, pointers, strides,
    HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return keys and values `[SLOTS, HEAD_DIM]` float32 of `kv_cache.entries.Packed` from `slot` on.

    A byte has a code of each half of the head dim: the halves are joined along a new last dim, which is then moved.
    """
    keys, values, key_grids, value_grids, _ = pointers
    _, value_part, key_step, value_step = strides
    HALF: tl.constexpr = HEAD_DIM // 2
    # The tokens of a run are in the same group: [runs, HALF, RUN].
    first = slot + tl.arange(0, SLOTS // RUN)[:, None, None] * RUN
    in_run, dims = tl.arange(0, RUN)[None, None, :], tl.arange(0, HALF)[None, :, None]
    byte_at = keys + (first // PACKED * HALF + dims) * PACKED + first % PACKED + in_run
    byte = tl.load(byte_at, mask=first + in_run < stop, other=0)
    low_at, exists = key_grids + first // PACKED * HEAD_DIM + dims, first < stop
    lower = _dequantized(byte & 15, low_at, low_at + key_step, exists)
    upper = _dequantized(byte >> 4, low_at + HALF, low_at + HALF + key_step, exists)
    k = tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 3, 1)), (SLOTS, HEAD_DIM))

    # The channels of a part of the head dim share a grid; each half has several parts: [SLOTS, parts, channels].
    IN_HALF: tl.constexpr = (PARTS + 1) // 2
    CHANNELS: tl.constexpr = HALF // IN_HALF
    slots = slot + tl.arange(0, SLOTS)[:, None, None]
    part, channel = tl.arange(0, IN_HALF)[None, :, None], tl.arange(0, CHANNELS)[None, None, :]
    exists = slots < stop
    byte = tl.load(values + slots * HALF + part * CHANNELS + channel, mask=exists, other=0)
    low_at = value_grids + part * value_part + slots
    lower = _dequantized(byte & 15, low_at, low_at + value_step, exists)
    low_at += PARTS // 2 * value_part
    upper = _dequantized(byte >> 4, low_at, low_at + value_step, exists)
    v = tl.reshape(tl.permute(tl.join(lower, upper), (0, 3, 1, 2)), (SLOTS, HEAD_DIM))
    return k, v


@triton.jit
def _loaded(at, exists, MASKED: tl.constexpr):
    """Return the numbers at `at`, 0 where they do not exist. Without MASKED, all exist."""
    if MASKED:
        numbers = tl.load(at, mask=exists, other=0.0)
    else:
        numbers = tl.load(at)
    return numbers


@triton.jit
def _attend_tile(
    state, slot, q, query, stop, pointers, strides, n_ring, scale, window, maxima,
    HEAD_DIM: tl.constexpr, SLOTS: tl.constexpr, QUANTIZED: tl.constexpr, SCORED: tl.constexpr,
    IN_ORDER: tl.constexpr, WINDOWED: tl.constexpr, PACKED: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Fold SLOTS slots from `slot` on into the running softmax. Without MASKED, all of them are seen.

    `state` is the largest score, the sum of weights and the weighted values of each row. Scores are in units of log 2.
    The highest score of every SCORED slots, if that is not 0, goes to `maxima`, which points to each row's. The other
    pointers are those of the row and head; a tile lies within 32-bit offsets of them.
    """
    best, total, acc = state
    keys, values, key_scales, value_scales, positions = pointers
    k_slot, v_slot, ks_slot, vs_slot = strides
    offsets = tl.arange(0, SLOTS)
    dims = tl.arange(0, HEAD_DIM)
    first = tl.cast(slot, tl.int64)
    exists = slot + offsets < stop
    if PACKED:
        k, v = _unpacked_tile(slot, stop, pointers, strides, HEAD_DIM, SLOTS, PACKED, RUN, PARTS)
    else:
        key_at = keys + first * k_slot + (offsets[:, None] * k_slot + dims[None, :])
        value_at = values + first * v_slot + (offsets[:, None] * v_slot + dims[None, :])
        k = _loaded(key_at, exists[:, None], MASKED)
        v = _loaded(value_at, exists[:, None], MASKED)

    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if QUANTIZED:
        key_scale = _loaded(key_scales + first * ks_slot + offsets * ks_slot, exists, MASKED)
        value_scale = _loaded(value_scales + first * vs_slot + offsets * vs_slot, exists, MASKED)
        scores *= (key_scale * scale)[None, :]
    else:
        scores *= scale

    if MASKED:
        if IN_ORDER:
            position = tl.where(exists, slot + offsets, UNSEEN)
            if PACKED:  # a token in the ring is seen there
                recent = tl.load(positions + position % n_ring, mask=exists, other=-1)
                position = tl.where(recent == position, UNSEEN, position)
        else:
            position = tl.load(positions + slot + offsets, mask=exists, other=-1).to(tl.int32)
            position = tl.where(position >= 0, position, UNSEEN)
        visible = position[None, :] <= query[:, None]
        if WINDOWED:
            visible &= position[None, :] > query[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))

    if SCORED:
        highest = tl.max(tl.reshape(scores, [scores.shape[0], SLOTS // SCORED, SCORED]), 2)
        together = slot // SCORED + tl.arange(0, SLOTS // SCORED)
        is_read = (query[:, None] >= 0) & (together * SCORED < stop)
        tl.store(maxima[:, None] + together[None, :], highest, mask=is_read)
    new_best = tl.maximum(best, tl.max(scores, 1))
    # In a row that has seen nothing yet, the best score is -inf, and -inf - -inf is NaN.
    base = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
    decay = tl.exp2(best - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * decay + tl.sum(weights, 1)
    acc *= decay[:, None]
    if QUANTIZED:
        weights *= value_scale[None, :]
    if QUANTIZED and q.dtype == tl.float16:  # small weights times a scale would underflow
        top = tl.maximum(tl.max(weights, 1), 1e-30)[:, None]
        acc += top * tl.dot((weights / top).to(q.dtype), v.to(q.dtype), input_precision="ieee")
    else:
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return new_best, total, acc


# Numbers that change from call to call must not compile another variant in the middle of a run.
@triton.jit(do_not_specialize=["n_token", "n_kv_head", "n_slot", "chunk", "n_chunk", "n_ring", "window"])
def split_kv(
    q, keys, values, key_scales, value_scales, stored_rows, queries, positions, out, log_sums, maxima,
    q_row, q_token, q_head, k_row, k_slot, k_head, v_row, v_slot, v_head,
    ks_row, ks_slot, ks_head, vs_row, vs_slot, vs_head, positions_row,
    n_token, n_kv_head, n_slot, chunk, n_chunk, n_ring, window, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, MAX_TOKENS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    MAPPED: tl.constexpr, QUANTIZED: tl.constexpr, SCORED: tl.constexpr, IN_ORDER: tl.constexpr, WINDOWED: tl.constexpr,
    PACKED: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS of the `n_token * GROUP` query rows of a row and KV head to a chunk of its slots; grid `[row
    blocks, chunks, B * n_kv_head]`.

    With MAPPED, `stored_rows [B]` int64 has the row of the entries that each row of queries attends to. Softmax follows
    Milakov and Gimelshein (2018), the chunks Flash-Decoding (Dao et al., 2023). With SPLIT, `out` float32 `[B, n_token,
    H, n_chunk, HEAD_DIM]` takes each chunk's result and `log_sums [B, n_token, H, n_chunk]` its log2 of the sum of
    weights, -inf where a query sees nothing of the chunk; without, `out [B, n_token, H, HEAD_DIM]` takes the whole
    result. If SCORED is not 0, `maxima` float32 `[B, n_token, H, n_slot / SCORED]` takes the highest score of every
    SCORED slots that were read, and `log_sums` is filled.

    For tokens in 4 bits, PACKED is the number of tokens that share a key's grid, RUN its greatest common divisor with
    SLOTS, and PARTS the number of grids of a value. Keys and values are then codes, their scales the grids' lowest
    numbers, and `positions [B, n_ring]` those of the ring. The scales' strides by slot are the distance from lowest
    numbers to steps, and the values' stride by slot is the distance between grids. Two launches share `out` and
    `log_sums`; their chunks differ.
    """
    chunk_index = tl.program_id(1)
    b = (tl.program_id(2) // n_kv_head).to(tl.int64)
    h = (tl.program_id(2) % n_kv_head).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = rows // GROUP
    head = h * GROUP + rows % GROUP
    real = token < n_token
    out_row = (b * n_token + token) * (n_kv_head * GROUP) + head

    start = chunk_index * chunk
    stop = tl.minimum(start + chunk, n_slot)
    if IN_ORDER:
        tokens = tl.arange(0, MAX_TOKENS)
        at = tl.load(queries + b * n_token + tokens, mask=tokens < n_token, other=-1).to(tl.int32)
        last = tl.max(at, 0)
        earliest = tl.min(tl.where(tokens < n_token, at, last), 0)
        stop = tl.minimum(stop, last + 1)
        if WINDOWED:
            start = tl.maximum(start, (earliest - window + 1) // SLOTS * SLOTS)
    if SPLIT:
        out_row = out_row * n_chunk + chunk_index
        if start >= stop:
            tl.store(log_sums + out_row, float("-inf"), mask=real)
            return

    dims = tl.arange(0, HEAD_DIM)
    query = tl.load(queries + b * n_token + token, mask=real, other=-1).to(tl.int32)
    q_at = q + b * q_row + token[:, None] * q_token + head[:, None] * q_head + dims[None, :]
    q_tile = tl.load(q_at, mask=real[:, None], other=0.0)
    stored = tl.load(stored_rows + b) if MAPPED else b
    keys += stored * k_row + h * k_head
    values += stored * v_row + h * v_head
    positions += b * positions_row
    if QUANTIZED or PACKED:
        key_scales += stored * ks_row + h * ks_head
        value_scales += stored * vs_row + h * vs_head

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    state = (best, total, acc)
    pointers = (keys, values, key_scales, value_scales, positions)
    strides = (k_slot, v_slot, ks_slot, vs_slot)
    if SCORED:
        maxima += ((b * n_token + token) * (n_kv_head * GROUP) + head) * tl.cdiv(n_slot, SCORED)
    shared = (q_tile, query, stop, pointers, strides, n_ring, scale, window, maxima)
    masked_from = start
    if IN_ORDER and not WINDOWED:
        # Every query of the row sees the slots up to the earliest query, except those that the ring may have.
        seen_by_all = earliest + 1 - n_ring if PACKED else earliest + 1
        masked_from += tl.maximum(tl.minimum(stop, seen_by_all) - start, 0) // SLOTS * SLOTS
        for slot in tl.range(start, masked_from, SLOTS):
            state = _attend_tile(
                state, slot, *shared, HEAD_DIM, SLOTS, QUANTIZED, SCORED, IN_ORDER, WINDOWED, PACKED, RUN, PARTS,
                MASKED=False,
            )  # fmt: skip
    for slot in tl.range(masked_from, stop, SLOTS):
        state = _attend_tile(
            state, slot, *shared, HEAD_DIM, SLOTS, QUANTIZED, SCORED, IN_ORDER, WINDOWED, PACKED, RUN, PARTS,
            MASKED=True,
        )  # fmt: skip

    best, total, acc = state
    sums = tl.where(total > 0, total, 1.0)
    if SPLIT or SCORED:
        tl.store(log_sums + out_row, best + tl.log2(sums), mask=real)
    out_at = out + out_row[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_at, (acc / sums[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["n_chunk"])
def combine(partial, log_sums, out, n_chunk, HEAD_DIM: tl.constexpr, CHUNKS: tl.constexpr):
    """Merge the results of `split_kv` of a query and head, CHUNKS chunks at a time; grid `[B * n_token * H]`."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    best = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    for first in tl.range(0, n_chunk, CHUNKS):
        chunk = first + tl.arange(0, CHUNKS)
        log_sum = tl.load(log_sums + row * n_chunk + chunk, mask=chunk < n_chunk, other=float("-inf"))
        # Chunks that the query does not see were never written.
        seen = log_sum > float("-inf")
        tile_at = partial + (row * n_chunk + chunk)[:, None] * HEAD_DIM + dims[None, :]
        tile = tl.load(tile_at, mask=seen[:, None], other=0.0)
        new_best = tl.maximum(best, tl.max(log_sum, 0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        decay = tl.exp2(best - base)
        weights = tl.exp2(log_sum - base)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(tile * weights[:, None], 0)
        best = new_best
    tl.store(out + row * HEAD_DIM + dims, (acc / total).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["n_token", "n_kv_head", "n_slot", "n_chunk", "window"])
def score_chunks(
    maxima, log_sums, stored_rows, queries, chunk_scores, scores_row, scores_token, scores_head,
    n_token, n_kv_head, n_slot, n_chunk, window,
    GROUP: tl.constexpr, SCORES: tl.constexpr, CHUNKS: tl.constexpr, SCORED: tl.constexpr, MAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Turn SCORES of the `maxima` of a token and KV head into shares of attention, averaged over the heads of its
    group, in `chunk_scores [rows, >= n_token, n_kv_head, >= n_slot / SCORED]` float32; grid `[B * n_token * n_kv_head,
    blocks]`. The sums of CHUNKS chunks are merged at a time."""
    index = tl.program_id(0).to(tl.int64)
    b, token, h = index // (n_token * n_kv_head), index // n_kv_head % n_token, index % n_kv_head
    at = tl.program_id(1) * SCORES + tl.arange(0, SCORES)
    slot, query = at * SCORED, tl.load(queries + b * n_token + token)
    seen = (slot < n_slot) & (slot <= query)
    if WINDOWED:
        seen &= slot + SCORED > query - window + 1
    share = tl.zeros([SCORES], tl.float32)
    for g in tl.static_range(GROUP):
        row = index * GROUP + g
        best, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        for first in tl.range(0, n_chunk, CHUNKS):
            chunk = first + tl.arange(0, CHUNKS)
            log_sum = tl.load(log_sums + row * n_chunk + chunk, mask=chunk < n_chunk, other=float("-inf"))
            new_best = tl.maximum(best, tl.max(log_sum, 0))
            base = tl.where(new_best == float("-inf"), 0.0, new_best)
            total = total * tl.exp2(best - base) + tl.sum(tl.exp2(log_sum - base), 0)
            best = new_best
        score = tl.load(maxima + row * tl.cdiv(n_slot, SCORED) + at, mask=seen, other=float("-inf"))
        share += tl.exp2(score - best) / (total * GROUP)
    stored = tl.load(stored_rows + b) if MAPPED else b
    chunk_scores += stored * scores_row + token * scores_token + h * scores_head
    tl.store(chunk_scores + at, share, mask=slot < n_slot)
