"""What every request passes: the key, and at its end the metrics and its line in the log."""

import hmac
import json
import sys
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.failures import Failure
from serving.flags import ServeFlags
from serving.jobs import CANCELLED, Job, ms
from serving.service import Service

OPEN = {("GET", "/"), ("GET", "/health")}
GENERATING = {"/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"}


class Gate:
    """An ASGI middleware. key: what a request has to bring; None if nothing."""

    def __init__(self, app: ASGIApp, service: Service, key: str | None, flags: ServeFlags) -> None:
        self._app, self._service, self._flags = app, service, flags
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, n_bytes, most = time.perf_counter(), 0, 0, self._flags.limits.max_body_bytes
        scope["state"] = state = {**scope.get("state", {}), "job": None}

        async def bounded() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes > most:
                raise HTTPException(413, f"the body is too large: this server takes {most} bytes")
            return message

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if self._may_pass(scope):
                await self._app(scope, bounded, note)
            else:
                failure = Failure(401, "unauthorized", "this server wants a key: Authorization: Bearer KEY")
                body = failure.body(scope["path"].startswith("/v1"))
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, note)
        finally:
            if scope["method"] == "POST" and scope["path"] in GENERATING:
                self._done(scope, state["job"], status, time.perf_counter() - started)

    def _may_pass(self, scope: Scope) -> bool:
        if self._wanted is None or (scope["method"], scope["path"]) in OPEN:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._wanted)

    def _done(self, scope: Scope, job: Job | None, status: int, seconds: float) -> None:
        """Count and log a request for tokens."""
        metrics, failure = self._service.metrics, None if job is None else job.failure
        metrics.requests.inc()
        if job is not None and failure is None and job.finish not in (None, CANCELLED):
            metrics.answered(job)
        else:
            metrics.failed(failure.kind if failure else CANCELLED if job else "refused")
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": uuid.uuid4().hex[:12] if job is None else f"{job.request.index}",
            "route": scope["path"],
            "status": status,
            "total_ms": ms(seconds),
        }
        if job is not None:
            line |= job.log()
            if self._flags.http.log_prompts:
                line |= {"prompt": self._service.tokenizer.decode(job.request.prompt), "answer": job.text}
        print(json.dumps(line), file=sys.stderr, flush=True)
