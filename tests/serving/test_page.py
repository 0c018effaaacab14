"""The server's page in a browser: origins of tokens, side by side, errors, stopping."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.programs import ROOT

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 20_000  # ms, on a machine that is busy
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

PAGE = ROOT / "serving/page.html"
DRAFTS = {"draft": "self", "gamma": 3, "auto": True}
INFO = {"model_id": "a model", "chat": True, "verification": "coupled", "max_new_tokens": 256, "speculation": DRAFTS}
# Text, whether it is an accepted draft, and round: the halves of a character are two tokens.
ANSWER = [("Hé", False, 0), ("llo", True, 1), (" <b>", True, 1), ("", False, 1), ("🙂", True, 2), ("\n", False, 2)]


def events(tokens: Sequence[tuple[str, bool, int]], predicted_ms: float = 50.0, drafted: int = 6) -> Iterator[bytes]:
    """Yield the events of a stream; the last has details."""
    timings = {"predicted_ms": predicted_ms, "cache_n": 3, "draft_n": drafted}
    details = {"finish_reason": "length", "input_length": 4, "timings": timings}
    for place, (text, is_draft, number) in enumerate(tokens):
        is_last = place == len(tokens) - 1
        event = {
            "index": place + 1,
            "token": {"id": place, "text": text, "logprob": -0.5 * place, "special": False},
            "generated_text": "".join(text for text, *_ in tokens) if is_last else None,
            "details": details if is_last else None,
            "speculation": {"drafted": is_draft, "round": number, "acceptance_rate": number / 3 if number else None},
        }
        yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


class FakeServer:
    """A server without a model: it serves the page at `url`, and to each request the next of `answers`.

    An answer is a response, or a stream's bytes and the seconds between them. bodies, headers: of requests so far.
    gone: set when a client left a stream.
    """

    def __init__(self) -> None:
        self.url = ""
        self.info: dict[str, Any] = INFO
        self.answers: list[Response | Sequence[bytes | float]] = []
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.gone = threading.Event()

    async def stream(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        answer, gone = self.answers.pop(0), self.gone
        if isinstance(answer, Response):
            return answer

        async def chunks():
            try:
                for item in answer:
                    if isinstance(item, bytes):
                        yield item
                    else:
                        await asyncio.sleep(item)
            except asyncio.CancelledError:
                gone.set()
                raise

        return StreamingResponse(chunks(), media_type="text/event-stream")


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    fake = FakeServer()
    routes = [
        Route("/", lambda request: FileResponse(PAGE)),
        Route("/info", lambda request: JSONResponse(fake.info)),
        Route("/generate_stream", fake.stream, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser():
    playwright.expect.set_options(timeout=PATIENCE)
    with playwright.sync_playwright() as api:
        browser = api.chromium.launch(executable_path=BROWSER)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser):
    """An empty page of a browser, which may not complain of anything."""
    page, complaints = browser.new_page(viewport={"width": 1280, "height": 900}), []
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
    assert not complaints


@pytest.fixture
def page(fake, tab):
    tab.goto(fake.url)
    return tab


def expect(page, selector):
    return playwright.expect(page.locator(selector), selector)


def send(fake, page, answer, state="done: 6 tokens"):
    """Send, and wait for the end of the answer."""
    fake.answers = [answer]
    page.click("#send")
    expect(page, "#state").to_have_text(state)


def figures(page, column=0):
    of = page.locator("dl").nth(column)
    return dict(zip(of.locator("dt").all_inner_texts(), of.locator("dd").all_inner_texts(), strict=True))


def test_tokens_wear_their_origin_however_the_bytes_are_cut(fake, page):
    whole = b": a comment\n\n" + b"".join(events(ANSWER))
    inside = whole.index("🙂".encode()) + 2  # in the middle of that character: two parts for a slow reader, too
    ends = [*range(inside % 7, len(whole), 7), len(whole)]
    pauses = [0.5 if end == inside else 0.001 for end in ends]
    cut = [whole[start:end] for start, end in pairwise([0, *ends])]
    send(fake, page, [part for both in zip(cut, pauses, strict=True) for part in both])
    classes = page.locator(".text span").evaluate_all("all => all.map((token) => token.className)")
    assert classes == ["prefill", "draft", "draft", "target", "draft", "target break"]
    assert page.locator(".text").evaluate("text => text.textContent") == "Héllo <b>🙂\n"
    assert (found := figures(page)).pop("first token, 3 of 4 prompt tokens cached").endswith(" s")
    assert found == {"tokens/s": "100.0", "tokens per round": "2.50", "acceptance rate": "0.67", "tokens": "6"}
    expect(page, "#columns").to_contain_text("ended at the limit of new tokens; prompt: 4 tokens")


def test_the_page_sends_the_chosen_parameters(fake, page):
    fake.answers = [list(events(ANSWER)) for _ in range(3)]
    page.fill("#prompt", "<img src=x onerror=alert(1)>")
    page.click("#send")
    expect(page, "#sampling").to_have_text("sampling: greedy")
    expect(page, "#send").to_be_enabled()
    for label, value in (("Temperature", "0.8"), ("Top p", "0.9"), ("New tokens", "7"), ("API key", "secret")):
        page.get_by_label(label).fill(value)
    page.get_by_label("chat template").uncheck()
    page.click("#send")
    expect(page, "#send").to_be_enabled()
    page.get_by_label("Seed").fill("42")
    page.click("#send")
    expect(page, "#sampling").to_have_text("sampling: temperature 0.8, top p 0.9, seed 42")
    greedy, drawn, given = fake.bodies
    chosen = {"max_new_tokens": 128, "do_sample": False, "details": True, "chat": True, "speculate": True}
    assert greedy == {"inputs": "<img src=x onerror=alert(1)>", "parameters": chosen}
    assert [headers.get("authorization") for headers in fake.headers] == [None, "Bearer secret", "Bearer secret"]
    sampled = {"max_new_tokens": 7, "do_sample": True, "temperature": 0.8, "top_p": 0.9, "details": True, "seed": 42}
    assert given["parameters"] == sampled | {"speculate": True}
    assert drawn["parameters"].keys() == given["parameters"].keys() and drawn["parameters"]["seed"] != 42


def test_a_token_with_markup_stays_text_and_can_be_pointed_at(fake, page):
    """The server has no chat template and no plain rounds, so the page does not offer them."""
    hostile = "<img src=x onerror=document.title='!'><script>document.title='!'</script>"
    fake.info = INFO | {"model_id": hostile, "chat": False, "plain_requests": False}
    page.reload()
    for control in ("#chat", "#beside"):
        expect(page, control).to_be_disabled()
    send(fake, page, list(events([(hostile, False, 0), (hostile, True, 1)])), state="done: 2 tokens")
    assert page.locator(".text").inner_text() == 2 * hostile
    expect(page, "#model").to_have_text(f"{hostile}: self drafts up to 3 tokens a round, coupled verification")
    assert page.locator("img").count() == 0 and page.title() == "Foretoken"
    assert "chat" not in fake.bodies[0]["parameters"]
    page.hover(".text span:nth-child(2)")
    expect(page, "#tip").to_contain_text("token 2, id 1")
    page.hover("h1")
    expect(page, "#tip").to_be_empty()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (JSONResponse({"error": "no `top_k`", "error_type": "validation"}, 422), "422 (validation): no `top_k`"),
        (PlainTextResponse("<h1>proxy</h1>", 502), "502: Bad Gateway"),
        ([next(events(ANSWER)), b'data: {"error": "lost", "error_type": "generation"}\n\n'], "lost (generation)"),
        ([*events(ANSWER)][:3], "the stream ended before the answer was complete"),
    ],
    ids=["refused", "proxy", "midstream", "cut"],
)
def test_errors_stand_where_they_happened(fake, page, answer, said):
    send(fake, page, answer, state="failed")
    expect(page, "#columns [role=alert]").to_contain_text(said)
    kept = 0 if isinstance(answer, Response) else sum(b'"token"' in chunk for chunk in answer)
    assert page.locator(".text span").count() == kept
    expect(page, "#send").to_be_enabled()


@pytest.mark.parametrize("way", ["click", "Escape"])
def test_stopping_closes_the_connection(fake, page, way):
    """Until then its figures are live."""
    fake.answers = [[*[*events(ANSWER)][:4], 60.0]]
    page.check("#beside")
    page.click("#send")
    expect(page, "#columns > div:first-child dl div:last-child dd").to_have_text("4")
    expect(page, "#columns > div:last-child > p").to_have_text("queued")
    page.click("#stop") if way == "click" else page.keyboard.press("Escape")
    expect(page, "#state").to_have_text("stopped")
    expect(page, "#columns > div:first-child > p").to_have_text("stopped after 4 tokens")
    expect(page, "#columns > div:last-child > p").to_have_text("not decoded")
    assert fake.gone.wait(PATIENCE / 1000)
    assert len(fake.bodies) == 1 and page.inner_text("#verdict") == ""


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_a_model_says_the_same_with_and_without_speculation(served, tab, temperature):
    tab.goto(served.url)
    tab.fill("#prompt", "<b>Why?")
    tab.fill("#new", "60")
    tab.fill("#temperature", temperature)
    tab.fill("#seed", "11")
    tab.check("#beside")
    tab.click("#send")
    expect(tab, "#verdict").to_contain_text("The same ")
    first, second = (figures(tab, column) for column in (0, 1))
    texts = [text.evaluate("text => text.textContent") for text in tab.locator(".text").all()]
    assert texts[0] == texts[1] and first["tokens"] == second["tokens"]
    assert float(second["tokens per round"]) > 1 and 0 < float(second["acceptance rate"]) <= 1
    n_drafts, n_plain, n_prefilled = (tab.locator(f".text .{kind}").count() for kind in ("draft", "target", "prefill"))
    assert n_drafts and n_plain and n_prefilled == 1 and n_drafts + n_plain + n_prefilled == int(second["tokens"])
