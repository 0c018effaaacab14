"""The engine: runners, drafters, verification, and the one decode loop."""

from engine.decoding import GenerateOutput, generate
from engine.drafters import Drafter, NGram, SavedText, SelfSpeculation, StandaloneDraft
from engine.runner import ModelRunner
from engine.sampling import SamplingParams
from engine.verification import Verdict, verify_coupled, verify_greedy, verify_rejection

__all__ = [
    "Drafter",
    "GenerateOutput",
    "ModelRunner",
    "NGram",
    "SamplingParams",
    "SavedText",
    "SelfSpeculation",
    "StandaloneDraft",
    "Verdict",
    "generate",
    "verify_coupled",
    "verify_greedy",
    "verify_rejection",
]
