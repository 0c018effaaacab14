"""Generated pages are what their records say, are made of records that are there."""

import pytest
from published_runs import name_of

from reproduce import performance_page, published_page

SCRIPTS = pytest.mark.parametrize("script", [performance_page, published_page], ids=name_of)


@SCRIPTS
def test_the_committed_page_is_what_its_records_say(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), script.__name__
