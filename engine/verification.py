"""The public names of the verification rules, which `engine.sampling.verification` defines."""

from engine.sampling.verification import Verdict, verify_coupled, verify_greedy, verify_rejection

__all__ = ["Verdict", "verify_coupled", "verify_greedy", "verify_rejection"]
