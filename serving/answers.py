"""What clients are told: failures in the words of their route's family, and answers that are streamed."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse, Response, StreamingResponse

from common.errors import UserError

Events = AsyncIterator[list[dict[str, Any]]]
DONE = "data: [DONE]\n\n"


@dataclass(eq=False)
class Failure(Exception):
    """status: of HTTP. kind: text-generation-inference's `error_type`, and OpenAI's `code`. param: what it is about."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self, is_openai: bool) -> dict[str, Any]:
        """As the routes of that family say it."""
        if not is_openai:
            return {"error": self.message, "error_type": self.kind}
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        type_ = kinds.get(self.status, "invalid_request_error" if self.status < 424 else "server_error")
        return {"error": {"message": self.message, "type": type_, "param": self.param, "code": self.kind}}

    def response(self, path: str) -> Response:
        return JSONResponse(self.body(path.startswith("/v1")), self.status, self.headers)


def invalid(param: str, message: str) -> Failure:
    """A value that cannot be had, by the name of the parameter."""
    return Failure(422, "validation", f"{param}: {message}", param)


def refused(param: str, error: UserError) -> Failure:
    """The same of what a template refuses: what is wrong, and what was seen."""
    return invalid(param, f"{error.what}: {error.seen}")


async def stream(events: Events, is_openai: bool) -> Response:
    """Server-sent events, one write a step. Raises the failure of a request that has not begun yet."""
    begun: list[dict[str, Any]] = await anext(events, [])

    async def lines() -> AsyncIterator[str]:
        try:
            yield _lines(begun)
            async for event in events:
                yield _lines(event)
        except Failure as failure:
            yield _lines([failure.body(is_openai)])
        if is_openai:
            yield DONE

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _lines(events: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
