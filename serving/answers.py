"""What clients are told: failures in the words of their route's family, and answers that are streamed."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

Events = AsyncIterator[list[dict[str, Any]]]
DONE = "data: [DONE]\n\n"
# What OpenAI's clients know a prompt by that is too long, with status 400.
TOO_LONG = "context_length_exceeded"


@dataclass(eq=False)
class Failure(Exception):
    """status: of HTTP. kind: OpenAI's `code`, and text-generation-inference's `error_type`, which has no word for
    TOO_LONG. param: what it is about."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def body(self, is_openai: bool) -> dict[str, Any]:
        """As the routes of that family say it."""
        if not is_openai:
            return {"error": self.message, "error_type": "validation" if self.kind == TOO_LONG else self.kind}
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        type_ = kinds.get(self.status, "invalid_request_error" if self.status < 424 else "server_error")
        return {"error": {"message": self.message, "type": type_, "param": self.param, "code": self.kind}}

    def response(self, request: Request) -> Response:
        """Noted for the metrics, too."""
        request.state.failure, is_openai = self, request.url.path.startswith("/v1")
        status = 400 if is_openai and self.kind == TOO_LONG else self.status
        return JSONResponse(self.body(is_openai), status, self.headers)


def invalid(param: str, message: str, kind: str = "validation") -> Failure:
    """A value that cannot be had, by the name of the parameter."""
    return Failure(422, kind, f"{param}: {message}", param)


def internal(error: Exception) -> Failure:
    return Failure(500, "internal", f"the server has failed ({type(error).__name__})")


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
