"""Several processes that run the same model."""

from engine.parallel.launch import end_on_ranks
