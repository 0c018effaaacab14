"""A server without a model, whose answers are cut and timed as a test wants them."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from programs import ROOT
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE = ROOT / "serving/page.html"
DRAFTS = {"draft": "self", "gamma": 3, "auto": True}
INFO = {"model_id": "a model", "chat": True, "verification": "coupled", "max_new_tokens": 256, "speculation": DRAFTS}
# Text, whether it is an accepted draft, and round: the halves of a character are two tokens.
ANSWER = [("Hé", False, 0), ("llo", True, 1), (" <b>", True, 1), ("", False, 1), ("🙂", True, 2), ("\n", False, 2)]
PLAIN = [(text, False, number) for number, (text, *_) in enumerate(ANSWER)]


def events(
    tokens: Sequence[tuple[str, bool, int]],
    predicted_ms: float = 50.0,
    drafted: int = 6,
    ids: Sequence[int] | None = None,
) -> Iterator[bytes]:
    """Yield the events of a stream; the last has details."""
    timings = {"predicted_ms": predicted_ms, "cache_n": 3, "draft_n": drafted}
    details = {"finish_reason": "length", "input_length": 4, "timings": timings}
    for place, (text, is_draft, number) in enumerate(tokens):
        is_last = place == len(tokens) - 1
        id_ = ids[place] if ids else place
        event = {
            "index": place + 1,
            "token": {"id": id_, "text": text, "logprob": -0.5 * place, "special": False},
            "generated_text": "".join(text for text, *_ in tokens) if is_last else None,
            "details": details if is_last else None,
            "speculation": {"drafted": is_draft, "round": number, "acceptance_rate": number / 3 if number else None},
        }
        yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()


class FakeServer:
    """Serves the page at `url`, and to each request the next of `answers`: a response, or a stream's bytes and the
    seconds between them. bodies, headers: of requests so far. gone: set when a client left a stream."""

    def __init__(self) -> None:
        self.url = ""
        self.forget()

    def forget(self) -> None:
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


@contextmanager
def pretending() -> Iterator[FakeServer]:
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
