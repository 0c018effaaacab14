"""The engine: runners, drafters, verification, and the decode loop."""

from engine.decoding import Decoder
from engine.drafters import Drafter
from engine.drafters.self_speculation import SelfSpeculation
from engine.drafters.standalone import StandaloneDraft
from engine.generation import GenerateOutput, generate
from engine.requests import Request
from engine.runner import ModelRunner
from engine.sampling.distribution import SamplingParams
from engine.verification import Verdict, verify_coupled, verify_greedy, verify_rejection
