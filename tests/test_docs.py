"""The pages' own links lead somewhere, and their commands name scripts and flags that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny import continue_by_recomputing, full_cache, random_prompts, tiny_model

from engine import ModelRunner, SelfSpeculation, generate

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md")), ROOT / "reproduce/README.md"]
SOURCES = ("engine", "reproduce", "tests")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if "://" not in t and not (page.parent / t).exists()]
    assert not missing


def test_commands_name_scripts_and_flags_that_there_are():
    """Every `python path.py` of a page, and every flag of its lines that begin with such a command."""
    code = "\n".join(path.read_text() for name in SOURCES for path in (ROOT / name).rglob("*.py"))
    code += "".join((ROOT / name).read_text() for name in ("download.py", "convert_hf_checkpoint.py"))
    known = set(re.findall(r'"--(\w+)"', code)) | {"benchmark"}
    checked = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:\S+=\S+ )*(?:python|torchrun|srun)[^\n]*", text, flags=re.MULTILINE):
            scripts = re.findall(r"(?<![\w/.-])((?:tests|reproduce)/\S+\.py)", line)
            assert all((ROOT / script).is_file() for script in scripts), line
            if scripts:
                flags = re.findall(r" --(\w+)", line.partition("#")[0].partition(".py")[2])
                assert set(flags) <= known, (page.name, line)
                checked += len(flags)
    assert checked > 30


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
