"""The engine: runners, drafters, verification, and the one decode loop."""

from typing import TYPE_CHECKING

from common.lazy import lazily

if TYPE_CHECKING:
    from engine.bench.config import RunConfig
    from engine.bench.session import Session
    from engine.decoding import Decoder, GenerateOutput, generate
    from engine.drafters import Drafter, NGram, SavedText, SelfSpeculation, StandaloneDraft
    from engine.requests import Request
    from engine.runner import ModelRunner
    from engine.sampling import SamplingParams
    from engine.verification import Verdict, verify_coupled, verify_greedy, verify_rejection

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
