"""Published acceptance rates, for predictions without a measurement: MagicDec (arXiv 2408.11049), on PG-19."""

# Acceptance rates by context (tokens), by model, policy and budget.
LLAMA_3 = {4000: 0.84, 8000: 0.83, 16000: 0.82, 32000: 0.81, 64000: 0.79, 100000: 0.79}
ACCEPTANCE = {("meta-llama/Meta-Llama-3.1-8B", "streaming", 512): LLAMA_3}


def same_context(a: int, b: int) -> bool:
    """Return whether two contexts differ only by rounding, such as 8000 and 8192 tokens."""
    return abs(a - b) <= 0.03 * max(a, b)


def published_acceptance(model: str, policy: str, budget: int, context: int) -> float | None:
    """Return the published acceptance rate of self-speculation after `context` tokens; None if there is none."""
    by_context = ACCEPTANCE.get((model, policy, budget), {})
    return next((rate for known, rate in by_context.items() if same_context(known, context)), None)
