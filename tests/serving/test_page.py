"""The server's page in a browser: origins of tokens, side by side, and texts that look like markup."""

import json
import shutil

import pytest

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 20_000  # ms, on a machine that is busy
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")


@pytest.fixture
def page(served):
    """The page in a browser, which may not complain of anything."""
    playwright.expect.set_options(timeout=PATIENCE)
    with playwright.sync_playwright() as api, api.chromium.launch(executable_path=BROWSER) as browser:
        page, complaints = browser.new_page(), []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(served.url)
        yield page
        assert not complaints


def ask(page, **fields: str) -> None:
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.click("#send")


def test_a_model_says_the_same_with_and_without_speculation(page):
    page.check("#beside")
    ask(page, prompt="<b>Why?", new="60", temperature="0.9", seed="11")
    playwright.expect(page.locator("#verdict")).to_contain_text("The same ")
    plain, speculated = page.locator("#columns > div").all()
    assert plain.locator(".text").inner_text() == speculated.locator(".text").inner_text()
    kinds = ("draft", "target", "prefill")
    n_drafts, n_plain, n_prefilled = (speculated.locator(f".text .{kind}").count() for kind in kinds)
    names, values = speculated.locator("dt").all_inner_texts(), speculated.locator("dd").all_inner_texts()
    figures = dict(zip(names, values, strict=True))
    assert n_drafts and n_plain and n_prefilled == 1 and n_drafts + n_plain + 1 == int(figures["tokens"])
    assert float(figures["tokens per round"]) > 1 and 0 < float(figures["acceptance rate"]) <= 1


def test_a_token_with_markup_stays_text_and_an_error_stands_below_it(page):
    hostile = "<img src=x onerror=document.title='!'><script>document.title='!'</script>"
    token = {"id": 1, "text": hostile, "logprob": -0.5, "special": False}
    event = {"index": 1, "token": token, "generated_text": None, "details": None}
    event |= {"speculation": {"drafted": True, "round": 1, "acceptance_rate": 1.0}}
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in (event, {"error": hostile, "error_type": "generation"}))
    page.route("**/generate_stream", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    ask(page, prompt="a")
    playwright.expect(page.locator("#state")).to_have_text("failed")
    assert page.locator(".text").inner_text() == hostile
    assert hostile in page.locator("#columns [role=alert]").inner_text()
    assert page.locator("img").count() == 0 and page.title() == "Foretoken"
