"""The seeded bugs of `make mutants`: classic mistakes of speculative decoding, each as one edit of the source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` occurs once in `file` and becomes `new`; one of `tests` has to fail then."""

    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LAW = ("test_verification.py",)
JOINT = ("test_joint_law.py",)
FILTERS = ("test_sampling.py",)
NOISE = ("test_noise.py",)
WITNESS = ("test_witness.py",)
ENGINE = ("test_decoding.py",)
DECODER = ("test_decoder.py",)
SAMPLED = ("test_sampled_decoding.py",)
CACHE = ("test_kv_cache.py",)
CPP = ("test_cpp_attention.py",)
POSITIONS = ("test_cache_positions.py",)
DRAFT_MODELS = ("test_draft_models.py",)
PARALLEL = ("test_tensor_parallel.py",)
SELECTION = ("test_snapkv.py",)
ADAPTIVE = ("test_adaptive.py",)
COSTS = ("test_cost_model.py",)
POINTWISE_CPP = ("test_pointwise_cpp.py",)
CAPTURED = ("test_captured_rounds.py",)
SIDE_FILES = ("test_side_files.py",)
FILE_SUMS = ("test_file_sums.py",)
RECORDS = ("test_provenance.py",)

VERIFICATION = "engine/verification.py"
MODES = "engine/modes.py"
SAMPLING = "engine/sampling.py"
DECODING = "engine/decoding.py"
SLOT = "engine/slot.py"
ROUNDS = "engine/round.py"
GRAPHS = "engine/graphs.py"
STANDALONE = "engine/drafters/standalone.py"
STREAMING = "kv_cache/streaming.py"
SNAPKV = "kv_cache/snapkv.py"
SHARDS = "models/tensor_parallel.py"
PROVENANCE = "common/jsonl.py"

MUTANTS = (
    # Randomness
    Mutant(
        "drafting and resampling share their noise",
        MODES,
        "Stream.RESAMPLE, probs)",
        "Stream.DRAFT, probs)",
        LAW,
    ),
    Mutant(
        "drafting and accepting share their noise",
        MODES,
        "positions, Stream.ACCEPT, source",
        "positions, Stream.DRAFT, source",
        LAW,
    ),
    Mutant(
        "all drafts of a block are verified by one random number",
        MODES,
        "positions = batch.lengths[:, None] + 1 + torch.arange(n_drafts",
        "positions = batch.lengths[:, None] + 1 + 0 * torch.arange(n_drafts",
        LAW,
    ),
    Mutant(
        "every round resamples with the same noise",
        MODES,
        "resample = self._gumbel(batch.lengths + 1,",
        "resample = self._gumbel(0 * batch.lengths,",
        JOINT,
    ),
    Mutant(
        "requests share their noise",
        "engine/noise.py",
        "for x in (position, request, seed & MASK, (seed >> 32) & MASK))",
        "for x in (position, 0 * request, seed & MASK, (seed >> 32) & MASK))",
        SAMPLED,
    ),
    Mutant(
        "positions share their noise",
        "engine/noise.py",
        "for x in (position, request, seed & MASK, (seed >> 32) & MASK))",
        "for x in (0 * position, request, seed & MASK, (seed >> 32) & MASK))",
        NOISE,
    ),
    Mutant(
        "half of the seed is dropped",
        "engine/noise.py",
        "seed & MASK, (seed >> 32) & MASK))",
        "seed & MASK, 0 * seed))",
        SAMPLED,
    ),
    Mutant(
        "noise is keyed by the slot, not by the request",
        DECODING,
        "[request.id for request in rows]",
        "list(range(len(rows)))",
        SAMPLED,
    ),
    Mutant(
        "the draft's coupled noise is that of the next position",
        MODES,
        "self._drawn_with[:, i])",
        "self._drawn_with[:, i + 1])",
        SAMPLED,
    ),
    # The distribution
    Mutant(
        "filters apply to the draft's distribution only",
        MODES,
        "batch, probs = self._batch, self._batch.distribution.probs(logits)\n",
        "batch, probs = self._batch, logits.float().softmax(-1).to(logits.dtype)\n",
        JOINT,
    ),
    Mutant(
        "drafts are drawn from the filtered distribution, verified by the unfiltered one",
        MODES,
        "return (probs.log() + noise).argmax(dim=-1), probs",
        "return (probs.log() + noise).argmax(dim=-1), logits.softmax(-1)",
        LAW,
    ),
    Mutant(
        "top-p stops one token early",
        SAMPLING,
        "mass.cumsum(dim=-1) - mass <",
        "mass.cumsum(dim=-1) <",
        FILTERS,
    ),
    Mutant(
        "top-k keeps every token tied with the last",
        SAMPLING,
        "above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= n - above.sum(dim=-1, keepdim=True)))",
        "above | tied",
        FILTERS,
    ),
    Mutant(
        "ties go to the highest id",
        SAMPLING,
        "return logits.argmax(dim=-1)",
        "return logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)",
        LAW,
    ),
    Mutant(
        "one row's temperature rules the batch",
        SAMPLING,
        "temperature = _like(self.temperature, logits)",
        "temperature = _like(self.temperature[:1], logits)",
        SAMPLED,
    ),
    # Verification
    Mutant(
        "acceptance is not strict",
        VERIFICATION,
        "q_of_draft.double() < p_of_draft.double()",
        "q_of_draft.double() <= p_of_draft.double()",
        LAW,
    ),
    Mutant(
        "p rows are off by one",
        VERIFICATION,
        "target_probs[:, :-1].gather",
        "target_probs[:, 1:].gather",
        LAW,
    ),
    Mutant(
        "q rows are off by one",
        VERIFICATION,
        "draft_probs.gather(2, draft_tokens[..., None])",
        "draft_probs.roll(1, 1).gather(2, draft_tokens[..., None])",
        JOINT,
    ),
    Mutant(
        "the bonus comes from the wrong row",
        VERIFICATION,
        "p = target_probs[row, num_accepted]",
        "p = target_probs[row, (num_accepted - 1).clamp(min=0)]",
        JOINT,
    ),
    Mutant(
        "the residual takes q from the first row",
        VERIFICATION,
        "residual = (p - draft_probs[row, index]).clamp(min=0)",
        "residual = (p - draft_probs[row, 0 * index]).clamp(min=0)",
        JOINT,
    ),
    Mutant(
        "a rejected draft is replaced by a draw from p",
        VERIFICATION,
        "return torch.where((was_rejected & has_mass)[:, None], residual, p)",
        "return p",
        LAW,
    ),
    Mutant(
        "a residual is taken although nothing was rejected",
        VERIFICATION,
        "torch.where((was_rejected & has_mass)[:, None], residual, p)",
        "torch.where(has_mass[:, None], residual, p)",
        JOINT,
    ),
    Mutant(
        "a residual without mass has no fallback",
        VERIFICATION,
        "(was_rejected & has_mass)[:, None]",
        "was_rejected[:, None]",
        LAW,
    ),
    Mutant(
        "a drafter without probabilities is accepted like a certain one",
        VERIFICATION,
        "q_of_draft = torch.ones_like(p_of_draft)",
        "q_of_draft = p_of_draft / 2",
        JOINT,
    ),
    Mutant(
        "drafts behind a row's end are verified",
        VERIFICATION,
        "accepted = accepted & (index < draft_lengths[:, None])",
        "accepted = accepted & (index <= draft_lengths[:, None])",
        (*LAW, *SAMPLED),
    ),
    Mutant(
        "acceptance goes on behind the first rejection",
        VERIFICATION,
        "accepted.long().cumprod(dim=1).sum(dim=1)",
        "accepted.long().sum(dim=1)",
        WITNESS,
    ),
    Mutant(
        "the token after a rejection comes from the row before",
        VERIFICATION,
        "choice.gather(1, num_accepted[:, None])",
        "choice.gather(1, (num_accepted[:, None] - 1).clamp(min=0))",
        WITNESS,
    ),
    # Decoding
    Mutant(
        "a stop token inside the block is ignored",
        "engine/requests.py",
        "if token in self.stop_tokens:",
        "if token in self.stop_tokens and count == len(block):",
        ENGINE,
    ),
    Mutant(
        "the length limit is looked at after the block",
        "engine/requests.py",
        "elif len(self.tokens) == self.limit:",
        "elif len(self.tokens) >= self.limit and count == len(block):",
        ENGINE,
    ),
    Mutant(
        "tokens behind a stop are counted",
        SLOT,
        "add_round(outcome.drafted, len(block) - 1, kept)",
        "add_round(outcome.drafted, len(block) - 1, len(block))",
        ENGINE,
    ),
    Mutant(
        "a row that emits one token moves on by two",
        SLOT,
        "self.length += kept",
        "self.length += max(kept, 2)",
        WITNESS,
    ),
    Mutant(
        "the verification block starts one position late",
        ROUNDS,
        "self.batch.lengths[:, None] + torch.arange(self.gamma + 1,",
        "self.batch.lengths[:, None] + torch.arange(1, self.gamma + 2,",
        WITNESS,
    ),
    Mutant(
        "the draft starts one position late",
        "engine/drafters/self_speculation.py",
        "lengths[:, None] + i, cache)",
        "lengths[:, None] + i + 1, cache)",
        WITNESS,
    ),
    Mutant(
        "a row is trusted to hold its prompt when it does not",
        "engine/runner.py",
        "return torch.equal(self.cache.positions[row : row + 1, : len(prompt)], positions)",
        "return True",
        ENGINE,
    ),
    Mutant(
        "n-grams are looked up in what was rejected, too",
        "engine/drafters/ngram.py",
        "matches = position < last",
        "matches = position < last + gamma",
        ("test_drafters.py",),
    ),
    Mutant(
        "n-grams forget the tokens that the target adds",
        "engine/drafters/ngram.py",
        "        text.scatter_(1, lengths[:, None], batch.current[:, None])\n",
        "",
        ("test_drafters.py",),
    ),
    Mutant(
        "a saved text is read one token behind",
        "engine/drafters/saved_text.py",
        "following = batch.lengths - self._start + 1",
        "following = batch.lengths - self._start",
        ("test_drafters.py",),
    ),
    Mutant(
        "a token whose logits are not finite is emitted",
        SLOT,
        "if not ok), None)",
        "if ok is None), None)",
        ENGINE,
    ),
    Mutant(
        "the certificate excuses any flip at a near-tie",
        "engine/evaluation/certificate.py",
        "int((at_flips > 2 * eps).sum())",
        "int(((at_flips > 2 * eps) & (seen.gap[seen.flipped] > 2 * eps)).sum())",
        ("test_certificate.py",),
    ),
    Mutant(
        "the certificate trusts any calibration",
        "engine/evaluation/certificate.py",
        "return self.flips <= self.max_flip_share * self.positions",
        "return True",
        ("test_certificate.py",),
    ),
    Mutant(
        "the certificate compares forwards of one token with themselves",
        "engine/evaluation/certificate.py",
        "for logits in forced_logits(block)]",
        "for logits in forced_logits(1)]",
        ("test_certificate.py",),
    ),
    # Requests that come and go
    Mutant(
        "a cancelled request keeps its row",
        DECODING,
        "            if slot.request is request:\n                slot.request = None\n",
        "            pass\n",
        DECODER,
    ),
    Mutant(
        "a request that was cancelled while it waited starts all the same",
        DECODING,
        "            self._waiting.remove(request)\n",
        "            pass\n",
        DECODER,
    ),
    Mutant(
        "cancelling takes back how a request has ended",
        DECODING,
        "        if request.finish_reason is not None:\n            return\n        request.finish",
        "        request.finish",
        DECODER,
    ),
    Mutant(
        "a new request's filters replace those of the requests before",
        DECODING,
        "self._filters |= Filters.of(",
        "self._filters = Filters.of(",
        DECODER,
    ),
    Mutant(
        "a greedy request ends the sampling of the others",
        DECODING,
        "        if not request.sampling.greedy:\n            self._mode = mode\n",
        "        self._mode = mode\n",
        DECODER,
    ),
    Mutant(
        "a request that samples in a new way is decoded by the rounds made for those before",
        DECODING,
        "self._made_for, self._rounds = needed, {}",
        "self._made_for = needed",
        DECODER,
    ),
    Mutant(
        "a row whose request joins midway keeps the state of the last one",
        DECODING,
        "[request.id for request in rows])\n        self._set_state()\n",
        "[request.id for request in rows])\n",
        DECODER,
    ),
    Mutant(
        "a drafter that meets a request late is shown its prompt only",
        SLOT,
        "self.request.committed, self._followed[index])",
        "self.request.prompt, self._followed[index])",
        DECODER,
    ),
    Mutant(
        "n-grams do not learn what was decoded without them",
        "engine/drafters/ngram.py",
        "self._text[row, known : len(text)] = torch.tensor(text[known:],",
        "self._text[row, known : len(text)] = torch.tensor(text[known:]).mul(0).to(",
        ("test_drafters.py",),
    ),
    Mutant(
        "a saved text begins anew behind rounds without it",
        "engine/drafters/saved_text.py",
        "        if known == 0:\n",
        "        if True:\n",
        ("test_drafters.py",),
    ),
    # Caches and model
    Mutant(
        "rejected drafts stay in the target's cache",
        ROUNDS,
        "        self.runner.rollback(self.batch.lengths)\n",
        "",
        CACHE,
    ),
    Mutant(
        "rollback keeps one token too many",
        "kv_cache/base.py",
        "self.positions >= lengths[:, None], EMPTY",
        "self.positions > lengths[:, None], EMPTY",
        CACHE,
    ),
    Mutant(
        "the draft's cache is never rolled back",
        "engine/drafters/self_speculation.py",
        "        self.cache.rollback(lengths)\n",
        "        pass\n",
        CACHE,
    ),
    Mutant(
        "a refilled slot keeps the last prompt's entries",
        "kv_cache/base.py",
        "self.positions[row] = EMPTY",
        "pass",
        CACHE,
    ),
    Mutant(
        "an empty slot is visible",
        "models/attention/torch_backend.py",
        "visible = (slots >= 0) & (slots <= queries)",
        "visible = slots <= queries",
        ENGINE,
    ),
    Mutant(
        "a query sees the future",
        "models/attention/torch_backend.py",
        "(slots <= queries)",
        "(slots <= queries + 1)",
        ENGINE,
    ),
    Mutant(
        "the CPU kernel shows a query the future",
        "models/attention/cpp_kernel.cpp",
        "slots[start + s] > queries[m]",
        "slots[start + s] > queries[m] + 1",
        CPP,
    ),
    Mutant(
        "the CPU kernel forgets to shrink what it has summed",
        "models/attention/cpp_kernel.cpp",
        "mass[m] *= shrink;",
        "",
        CPP,
    ),
    Mutant(
        "the CPU kernel leaves out a mask that one query of a block needs",
        "models/attention/cpp_kernel.cpp",
        "to_all = std::min(to_all, queries[m])",
        "to_all = std::max(to_all, queries[m])",
        CPP,
    ),
    Mutant(
        "the CPU kernel reads float8 with another bias",
        "models/attention/cpp_kernel.cpp",
        "0x1p120f",
        "0x1p121f",
        CPP,
    ),
    Mutant(
        "8-bit entries share a scale over the block that they were written in",
        "kv_cache/entries.py",
        "scale = (x.abs().amax(dim=-1) / largest()[dtype])",
        "scale = (x.abs().amax(dim=(1, -1), keepdim=True)[..., 0].expand(x.shape[:-1]) / largest()[dtype])",
        ("test_llama_scenarios.py",),
    ),
    Mutant(
        "8-bit values are copied without their scales",
        "kv_cache/base.py",
        "scale = None if source.scales is None else",
        "scale = None if True else",
        CACHE,
    ),
    Mutant(
        "captured rounds follow a tensor that is replaced",
        "engine/drafters/standalone.py",
        "self._previous.copy_(self._block.gather(1, last[:, None]).squeeze(1))",
        "self._previous = self._block.gather(1, last[:, None]).squeeze(1)",
        CAPTURED,
    ),
    Mutant(
        "captured rounds look at lengths that have moved elsewhere",
        "engine/batch.py",
        "self._state[:2].copy_(torch.tensor([lengths, current]))",
        "self.lengths, self.current = torch.tensor([lengths, current])",
        CAPTURED,
    ),
    Mutant(
        "CUDA graphs of all runners share a capture stream, and so a cuBLAS workspace",
        GRAPHS,
        "torch.cuda.graph(graph, self._pool, self._stream, capture",
        "torch.cuda.graph(graph, self._pool, capture",
        CAPTURED,
    ),
    Mutant(
        "garbage is collected while a CUDA graph is captured",
        GRAPHS,
        "    gc.disable()\n",
        "",
        CAPTURED,
    ),
    Mutant(
        "a finished drafter's CUDA graphs stay",
        ROUNDS,
        "        runner.drop_graphs()\n",
        "        pass\n",
        CAPTURED,
    ),
    Mutant(
        "int4 weights take the neighbouring group's scale",
        "models/quantize.py",
        "torch.stack([scale, low + 8 * scale], dim=-1)",
        "torch.stack([scale.roll(1, 1), low + 8 * scale], dim=-1)",
        ("test_quantize.py",),
    ),
    Mutant(
        "int4 weights for GPUs are dequantised a level off",
        "models/quantize.py",
        ".to(torch.bfloat16).sub_(8)",
        ".to(torch.bfloat16).sub_(7)",
        ("test_quantize.py",),
    ),
    Mutant(
        "int8 rows for cuBLAS are one too few",
        "models/quantize.py",
        "FEWEST_CUDA_ROWS = 17",
        "FEWEST_CUDA_ROWS = 16",
        ("test_quantize.py",),
    ),
    Mutant(
        "the memory plan forgets the laws that captured rounds keep",
        "engine/bench/plan.py",
        '(gamma if plan.sampling.mode == "rejection" else 0)',
        "0",
        ("test_memory.py",),
    ),
    Mutant(
        "int8 activations share one scale over the batch",
        "models/pointwise.py",
        "(x.abs().amax(dim=-1, keepdim=True) / 127)",
        "(x.abs().amax().expand(len(x), 1) / 127)",
        ("test_quantize.py",),
    ),
    Mutant(
        "the Triton kernel shows a query the future",
        "models/attention/triton_kernels.py",
        "visible = position[None, :] <= query[:, None]",
        "visible = position[None, :] <= query[:, None] + 1",
        ("test_triton_attention.py",),
    ),
    Mutant(
        "the flash backend forgets the empty prefix",
        "models/attention/flash_backend.py",
        'lse[..., None].masked_fill(tail.no_prefix, float("-inf"))',
        "lse[..., None]",
        ("test_flash_attention.py",),
    ),
    Mutant(
        "the ring evicts a sink",
        "kv_cache/streaming.py",
        "return torch.where(positions < self.n_sink, positions, ring)",
        "return positions % (self.n_sink + self.window)",
        CACHE,
    ),
    Mutant(
        "verification does not write through to the draft's cache",
        "kv_cache/write_through.py",
        "            self.draft.write(self._draft_layer[layer], slots[1], new)\n",
        "            pass\n",
        WITNESS,
    ),
    Mutant(
        "rotary positions count from the block's start",
        "models/rope.py",
        "angles = positions[..., None].to(",
        "angles = (positions - positions.flatten()[0])[..., None].to(",
        ENGINE,
    ),
    Mutant(
        "an infinite key spreads to queries that do not see it",
        "kv_cache/entries.py",
        "torch.nan_to_num(torch.stack((keys, values), dim=-3), nan=0.0, posinf=0.0, neginf=0.0)",
        "torch.stack((keys, values), dim=-3)",
        ENGINE,
    ),
    # Drafts of their own
    Mutant(
        "a standalone draft does not catch up with the last committed token but one",
        STANDALONE,
        "            if i == 0:\n",
        "            if i < 0:\n",
        WITNESS,
    ),
    Mutant(
        "the catch-up takes the token behind the last committed one but one",
        STANDALONE,
        "last = (lengths - 1 - self._start)",
        "last = (lengths - self._start)",
        POSITIONS,
    ),
    Mutant(
        "a draft proposes ids that only it has",
        STANDALONE,
        "_fit(logits, self._vocab_size)",
        "logits",
        DRAFT_MODELS,
    ),
    Mutant(
        "a draft of some layers is filled from the first layers",
        "kv_cache/base.py",
        "else layers):",
        "else range(len(layers))):",
        DRAFT_MODELS,
    ),
    Mutant(
        "verification writes a skipped layer's KV to the draft",
        "kv_cache/write_through.py",
        "zip(layers or own, own",
        "zip(own, own",
        DRAFT_MODELS,
    ),
    Mutant(
        "positions in the cache leave a gap behind the sinks",
        STREAMING,
        "p - oldest + self.n_sink)",
        "p - oldest + self.n_sink + 1)",
        POSITIONS,
    ),
    Mutant(
        "keys are rotated on read by the text's positions, queries by the cache's",
        STREAMING,
        "return in_cache(positions), in_cache(self.positions)",
        "return in_cache(positions), self.positions",
        POSITIONS,
    ),
    Mutant(
        "a prompt's block evicts the whole window before it attends",
        STREAMING,
        "return max(1, self.window // 2)",
        "return self.window",
        POSITIONS,
    ),
    # Sharded models
    Mutant(
        "half a block is not summed over ranks",
        SHARDS,
        "return self._exchange.all_reduce(self.inner(x))",
        "return self.inner(x)",
        PARALLEL,
    ),
    Mutant(
        "every rank embeds an id that it does not have",
        SHARDS,
        "embedded.masked_fill(elsewhere[..., None], 0)",
        "embedded",
        PARALLEL,
    ),
    Mutant(
        "a shard's query heads are not those of its KV heads",
        SHARDS,
        "    q = (first * group * head_dim, end * group * head_dim)\n",
        "    q = ((n_kv - end) * group * head_dim, (n_kv - first) * group * head_dim)\n",
        PARALLEL,
    ),
    Mutant(
        "logits are joined in the order of ranks, not of shards",
        "engine/parallel/ranks.py",
        "by_shard = zip(self.ranks, widths, strict=True)",
        "by_shard = zip(sorted(self.ranks), widths, strict=True)",
        PARALLEL,
    ),
    # Selection by attention
    Mutant(
        "a query of the prompt's end votes for entries behind it",
        SNAPKV,
        "at > at[n_token - n_query :, None]",
        "at > at[-1]",
        SELECTION,
    ),
    Mutant(
        "scores are not scaled before the softmax that votes",
        SNAPKV,
        "@ keys.float().mT * head_dim**-0.5",
        "@ keys.float().mT",
        SELECTION,
    ),
    Mutant(
        "query heads vote for the wrong KV head",
        SNAPKV,
        "queries.float().reshape(n_kv_head, -1, head_dim)",
        "queries.float().view(-1, n_kv_head, n_query, head_dim).transpose(0, 1).reshape(n_kv_head, -1, head_dim)",
        SELECTION,
    ),
    Mutant(
        "the window takes part in the selection",
        SNAPKV,
        "[:, : length - self.window]",
        "",
        SELECTION,
    ),
    Mutant(
        "an entry's neighbours have no say",
        SNAPKV,
        "torch.nn.functional.avg_pool1d(votes, self.pool, stride=1, padding=self.pool // 2)",
        "votes",
        SELECTION,
    ),
    Mutant(
        "looking at the prompt's end writes to the target's cache",
        "engine/runner.py",
        "ReadOnlyKVCache(view)",
        "view",
        SELECTION,
    ),
    Mutant(
        "a draft of some layers selects by the first layers' queries",
        "kv_cache/base.py",
        "partial(queries.__getitem__, from_layer)",
        "partial(queries.__getitem__, to_layer)",
        SELECTION,
    ),
    # Rounds that choose
    Mutant(
        "a drafter that missed rounds goes on where it was",
        SLOT,
        "if self.request and self._followed[index] != self.length:",
        "if self.request and self._followed[index] > self.length:",
        ADAPTIVE,
    ),
    Mutant(
        "a refilled row's drafter still follows the last request",
        SLOT,
        "self.request, self.current, self._followed = request, token, {}",
        "self.request, self.current = request, token",
        DECODER,
    ),
    Mutant(
        "a draft model that missed rounds skips its last known token",
        STANDALONE,
        "max(0, known - 1))",
        "known)",
        ADAPTIVE,
    ),
    Mutant(
        "plain rounds are not counted, so speculation is never tried again",
        "engine/cost_model/adaptive.py",
        "self._plain_rounds += 1",
        "pass",
        ADAPTIVE,
    ),
    Mutant(
        "drafts behind a rejection count as judged",
        "engine/acceptance.py",
        "return [min(n_accepted + 1, gamma) for n_accepted in accepted]",
        "return [gamma for n_accepted in accepted]",
        ADAPTIVE,
    ),
    Mutant(
        "a trial is over after its first round",
        "engine/cost_model/adaptive.py",
        "return not reached or (reached < TRIAL_PLACES and self._may_pay(index, hoped, to_beat))",
        "return not reached",
        ADAPTIVE,
    ),
    Mutant(
        "a trial goes on although nothing may be hoped of it any more",
        "engine/cost_model/adaptive.py",
        " and self._may_pay(index, hoped, to_beat))",
        ")",
        ADAPTIVE,
    ),
    Mutant(
        "what was measured before never fades, and locks speculation out",
        "engine/cost_model/adaptive.py",
        "        self._measured *= share\n",
        "",
        ADAPTIVE,
    ),
    Mutant(
        "what was measured before counts for as much as it was",
        "engine/cost_model/adaptive.py",
        "min(measured.n, MOST_MEASURED)",
        "measured.n",
        ADAPTIVE,
    ),
    Mutant(
        "a drafter that is looked at again has to beat plain decoding only",
        "engine/cost_model/adaptive.py",
        "self._may_pay(index, hoped, to_beat)",
        "self._may_pay(index, hoped)",
        ADAPTIVE,
    ),
    Mutant(
        "what a trial lost does not lengthen the pause behind it",
        "engine/cost_model/adaptive.py",
        "round(self._lost_steps / TRIAL_SHARE)",
        "0",
        ADAPTIVE,
    ),
    Mutant(
        "costs are measured in no more rounds where there is time",
        "engine/cost_model/measure.py",
        "measure(fewest + min(max(0, n_more), MOST_TIMED - FEWEST_TIMED))",
        "measure(fewest)",
        ADAPTIVE,
    ),
    Mutant(
        "measuring goes on with the rows that are left",
        "engine/pacing.py",
        "if self.done or self._rows_are_missing:",
        "if self.done:",
        ADAPTIVE,
    ),
    Mutant(
        "a prompt that a drafter meets late is timed as a part of the round",
        DECODING,
        "            self.draft_prefill_seconds += self._introduce(",
        '            with self._phase("resume"):\n                self.draft_prefill_seconds += self._introduce(',
        ADAPTIVE,
    ),
    Mutant(
        "a draft step of all gammas is that of the largest",
        "engine/cost_model/measure.py",
        "n_drafted.append(sum(choice.gamma for choice in drafted))",
        "n_drafted.append(max(choice.gamma for choice in drafted))",
        ADAPTIVE,
    ),
    Mutant(
        "the luckiest of several drafters is believed",
        "engine/cost_model/adaptive.py",
        "non_increasing([seen.tokens(gamma) for seen in self._acceptance], weights)",
        "[seen.tokens(gamma) for seen in self._acceptance]",
        ADAPTIVE,
    ),
    Mutant(
        "whether speculation pays is judged by what idle drafters showed",
        "engine/cost_model/adaptive.py",
        "gamma, speedup = self._shown(self._active)",
        "gamma, speedup = self._ordered_promises()[self._active]",
        ADAPTIVE,
    ),
    Mutant(
        "what was dismissed is never looked at again",
        "engine/cost_model/adaptive.py",
        "elif self._rounds_since_trial >= SECOND_LOOK and not self._plain_rounds:",
        "elif False:",
        ADAPTIVE,
    ),
    Mutant(
        "where nothing pays the smallest budget takes over",
        "engine/cost_model/adaptive.py",
        "promised > 1 and (active <= 1",
        "(active <= 1",
        ADAPTIVE,
    ),
    Mutant(
        "predictions take the acceptance of the shortest context",
        "engine/bench/cost_report.py",
        "acceptances[context][draft]\n    speedup",
        "next(iter(acceptances.values()))[draft]\n    speedup",
        COSTS,
    ),
    Mutant(
        "a teacher-forced round goes on from what it emitted",
        "engine/evaluation/teacher_forcing.py",
        "round_.forward(text[:, start : start + gamma + 1])",
        "None",
        ("test_teacher_forcing.py",),
    ),
    Mutant(
        "costs between batches are those of the smallest",
        "engine/cost_model/costs.py",
        "np.interp(batch, self.batches,",
        "np.interp(self.batches[0], self.batches,",
        COSTS,
    ),
    Mutant(
        "every model reads the built-in book",
        "engine/bench/plan.py",
        "BUILT_IN if target.is_default else PG19",
        "BUILT_IN",
        ("test_data.py",),
    ),
    # Functions in C++
    Mutant(
        "the C++ norm is of sums that were cut, not rounded",
        "models/pointwise_kernel.cpp",
        "rounded<T>(load(x + i, n) + load(update + i, n))",
        "load(x + i, n) + load(update + i, n)",
        POINTWISE_CPP,
    ),
    Mutant(
        "C++ turns all heads to the first token's position",
        "models/pointwise_kernel.cpp",
        "(const T*)cos + t * head_dim",
        "(const T*)cos",
        POINTWISE_CPP,
    ),
    Mutant(
        "the C++ kernel leaves out what does not fill a vector",
        "models/pointwise_kernel.cpp",
        "if (i < n) body(i, (int)(n - i));",
        "",
        POINTWISE_CPP,
    ),
    Mutant(
        "C++ reads gates and ups as if their rows were side by side",
        "models/pointwise_kernel.cpp",
        "(const T*)gate_and_up + row * in_row",
        "(const T*)gate_and_up + row * 2 * n_out",
        POINTWISE_CPP,
    ),
    Mutant(
        "C++ functions replace the eager ones beside every attention",
        "models/pointwise_cpp.py",
        'backend.name != "cpp"',
        'backend.name == "flash"',
        POINTWISE_CPP,
    ),
    # What users give
    Mutant(
        "half of a surrogate pair is taken for a character",
        "engine/bench/data.py",
        "        value.encode()\n",
        '        value.encode(errors="surrogatepass")\n',
        ("test_data.py",),
    ),
    Mutant(
        "the tokenizer may be one id larger than the model",
        "engine/bench/model_source.py",
        "if largest >= vocab_size",
        "if largest > vocab_size",
        ("test_benchmarks.py",),
    ),
    # Checkpoints
    Mutant(
        "what was made from a GGUF that is gone is the user's own",
        "models/checkpoints/side_files.py",
        'if listed.get(name, {}).get("generated")}',
        "if name not in listed}",
        SIDE_FILES,
    ),
    Mutant(
        "weights go with the config.json of those before",
        "models/checkpoints/side_files.py",
        "set() if all(known) else others",
        "set() if any(listed) else others",
        SIDE_FILES,
    ),
    Mutant(
        "a file whose time of change was put back is the same version",
        "models/checkpoints/file_sums.py",
        "stat.st_mtime_ns, stat.st_ctime_ns)))",
        "stat.st_mtime_ns)))",
        FILE_SUMS,
    ),
    Mutant(
        "bytes beyond the last tensor of a GGUF are nothing to it",
        "models/checkpoints/gguf_reader.py",
        "if len(reader.data) != end:",
        "if len(reader.data) < end:",
        ("test_gguf.py",),
    ),
    # Records
    Mutant(
        "a record goes on the line that a killed run left unfinished",
        PROVENANCE,
        'b"" if file.read() == b"\\n" else b"\\n"',
        'b""',
        RECORDS,
    ),
    Mutant(
        "a record that nobody reads is not appended",
        PROVENANCE,
        "    finally:\n        append_record(path, record)",
        "    append_record(path, record)",
        RECORDS,
    ),
    Mutant(
        "of several ranks the first says whether they waited",
        "engine/contention.py",
        "waiting = max(told) if",
        "waiting = told[0] if",
        ("test_contention.py",),
    ),
)
