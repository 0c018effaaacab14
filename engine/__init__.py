"""The engine: runners, drafters, verification, and the one decode loop."""

from engine.decoding import GenerateOutput, generate
from engine.drafters import Drafter, SelfSpeculation
from engine.runner import ModelRunner
from engine.sampling import SamplingParams
from engine.verification import Verdict, verify_greedy

__all__ = [
    "Drafter",
    "GenerateOutput",
    "ModelRunner",
    "SamplingParams",
    "SelfSpeculation",
    "Verdict",
    "generate",
    "verify_greedy",
]
