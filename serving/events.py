"""Answers that are streamed: server-sent events, one write a step."""

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response, StreamingResponse

from serving.failures import Failure
from serving.jobs import CANCELLED, Job
from serving.service import Service

Events = AsyncIterator[list[dict[str, Any]]]
DONE = "data: [DONE]\n\n"


async def stream(service: Service, job: Job, events: Events, is_openai: bool) -> Response:
    """What each step adds, as it comes. Raises the failure of a request that has not begun yet."""
    begun: list[dict[str, Any]] = await anext(events, [])

    async def lines() -> AsyncIterator[str]:
        try:
            yield _lines(begun)
            async for event in events:
                yield _lines(event)
        except Failure as failure:
            yield _lines([failure.body(is_openai)])
        finally:  # the client may have left
            service.end(job, CANCELLED)
        if is_openai:
            yield DONE

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _lines(events: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
