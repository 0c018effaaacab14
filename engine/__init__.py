"""The engine: runners, drafters, verification, and the one decode loop."""

from common.lazy import lazily

_HOMES = {
    "engine.bench.config": ("RunConfig",),
    "engine.bench.session": ("Session",),
    "engine.decoding": ("Decoder", "GenerateOutput", "generate"),
    "engine.requests": ("Request",),
    "engine.drafters": ("Drafter", "NGram", "SavedText", "SelfSpeculation", "StandaloneDraft"),
    "engine.runner": ("ModelRunner",),
    "engine.sampling": ("SamplingParams",),
    "engine.verification": ("Verdict", "verify_coupled", "verify_greedy", "verify_rejection"),
}
__getattr__ = lazily(__name__, {name: module for module, names in _HOMES.items() for name in names})
