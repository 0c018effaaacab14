"""Server-sent events: an answer that is sent while it grows."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import Response, StreamingResponse

from serving.answers import Failure

# The events of each step.
Events = AsyncIterator[list[dict[str, Any]]]


async def stream(events: Events, is_openai: bool) -> Response:
    """Return server-sent events, written once a step. Raises a failure that comes before the first event."""
    first: list[dict[str, Any]] = await anext(events, [])

    async def lines() -> AsyncIterator[str]:
        try:
            yield _lines(first)
            async for more in events:
                yield _lines(more)
        except Failure as failure:
            yield _lines([failure.body(is_openai)])
        if is_openai:
            yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _lines(events: Sequence[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events)
