"""Generated pages are what their records say, are made of records that are there."""

import pytest
from published_runs import gpu_costs, name_of, write

from reproduce import performance_page, published_page
from reproduce.pages.generated_page import GPU, Flags

SCRIPTS = pytest.mark.parametrize("script", [performance_page, published_page], ids=name_of)


@SCRIPTS
def test_the_committed_page_is_what_its_records_say(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), script.__name__


@SCRIPTS
def test_check_fails_on_a_stale_page(script, tmp_path):
    before, page = script.page(tmp_path), tmp_path / "page.md"
    write(tmp_path / GPU, gpu_costs(prefix_len=16384, draft_budget=256))  # which are on both pages
    Flags().write_or_check(page, before)
    Flags(check=True).write_or_check(page, before)
    with pytest.raises(SystemExit, match=f"{page} is not what its records say: python reproduce/"):
        Flags(check=True).write_or_check(page, script.page(tmp_path))
    assert page.read_text() == before
    Flags().write_or_check(page, script.page(tmp_path))
    assert page.read_text() == script.page(tmp_path) != before
