"""Layers with experts: their products, and what they do not take."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from common.errors import ConfigError
from models import load_model
from models.config import ModelConfig
from models.experts import grouped, looped

EXPERTS = ModelConfig(64, 1, 64, 4, 2, 16, 32, n_expert=4, n_expert_per_token=2)


def test_products_by_expert_are_those_of_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(9, 16, generator=generator), torch.randn(4, 24, 16, generator=generator)
    counts, layers = torch.tensor([3, 0, 5, 1]), [partial(F.linear, weight=weight) for weight in weights]
    torch.testing.assert_close(grouped(x, weights, counts), looped(x, layers, counts))


def test_experts_are_not_quantised() -> None:
    with pytest.raises(ConfigError):
        load_model("none", load_format="dummy", config=EXPERTS, quantize="int4")
