"""The pages' own links lead somewhere, and their Python runs; `test_page_commands.py` plans their commands."""

from __future__ import annotations

import re

import pytest
import torch
from programs import ROOT
from tiny import continue_by_recomputing, full_cache, random_prompts, tiny_model

from engine import ModelRunner, SelfSpeculation, generate

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "reproduce/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_the_example_of_a_policy_works():
    """The page's own text is run: what it keeps is spread over the prompt, and the output is the target's."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(code, names)
    model, prompts = tiny_model(), random_prompts([40, 7, 23])
    runner = ModelRunner(model, full_cache(model, 2))
    cache = names["SpreadKVCache"](model.config, 2, 12, 4, dtype=torch.float64)
    out = generate(runner, prompts, max_new_tokens=15, drafter=SelfSpeculation(runner, cache, gamma=3))
    assert out.tokens == [continue_by_recomputing(model, prompt, 15) for prompt in prompts]
    runner.prefill_row(0, prompts[0])
    cache.fill_row(0, runner.cache, 40)
    assert torch.equal(cache.keys[:, 0, :, :4], runner.cache.keys[:, 0, :, [0, 8, 16, 24]])
