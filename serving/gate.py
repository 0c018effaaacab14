"""What every request passes: its host, the key, bounds on its body; at its end the metrics and its line in the log."""

import asyncio
import hmac
import json
import re
import sys
import time
import traceback
import uuid
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.answers import Failure, internal
from serving.jobs import CANCELLED, Job, ms
from serving.service import Service

OPEN = {(method, path) for method in ("GET", "HEAD") for path in ("/", "/health")}
GENERATING = {"/", "/generate", "/generate_stream", "/v1/completions", "/v1/chat/completions"}
# What a body has to arrive, in seconds.
BODY_SECONDS = 30.0
PORT = re.compile(r":\d+$")


class Gate:
    """An ASGI middleware. key: what a request has to bring; None if nothing. hosts: what it may call this machine, to
    which a page elsewhere can have a name of its own lead; None for anything."""

    def __init__(self, app: ASGIApp, service: Service, key: str | None, hosts: Collection[str] | None) -> None:
        self._app, self._service, self._flags, self._hosts = app, service, service.flags, hosts
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status, n_bytes, is_whole = time.perf_counter(), 0, 0, False
        most, seconds = self._flags.limits.max_body_bytes, min(BODY_SECONDS, self._flags.limits.request_seconds)
        scope["state"] = state = {**scope.get("state", {}), "job": None, "failure": None}

        async def bounded() -> Message:
            nonlocal n_bytes, is_whole
            if is_whole:  # whoever asks for more waits for the client to leave
                return await receive()
            try:
                async with asyncio.timeout(seconds - (time.perf_counter() - started)):
                    message = await receive()
            except TimeoutError:
                text = f"the body has not arrived within {seconds:g} seconds"
                raise HTTPException(408, text, {"Connection": "close"}) from None
            n_bytes, is_whole = n_bytes + len(message.get("body", b"")), not message.get("more_body", False)
            if n_bytes > most:
                raise HTTPException(413, f"the body is too large: this server takes {most} bytes")
            return message

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        async def refuse(failure: Failure) -> None:
            await failure.response(Request(scope))(scope, receive, note)

        try:
            if (refusal := self._refusal(scope)) is not None:
                await refuse(refusal)
            else:
                await self._app(scope, bounded, note)
        except Exception as error:
            if status:  # an answer that has begun cannot become another one
                raise
            await refuse(internal(error))
            traceback.print_exc()
        finally:
            if (job := state["job"]) is not None:
                self._service.end(job, "refused" if state["failure"] else CANCELLED)  # nobody reads on
            if scope["method"] == "POST" and scope["path"] in GENERATING:
                self._done(scope, job, state["failure"], status, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> Failure | None:
        headers = dict(reversed(scope["headers"]))  # of several the first counts
        host = PORT.sub("", headers.get(b"host", b"").decode("latin-1").lower())
        if self._hosts is not None and host not in self._hosts:
            said = headers.get(b"host", b"").decode("latin-1") or "nameless"
            return Failure(400, "validation", f"this server is {' or '.join(self._hosts)}, not {said}")
        if self._key is None or (scope["method"], scope["path"]) in OPEN:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key):
            return None
        text = "this server wants a key: Authorization: Bearer KEY"
        return Failure(401, "unauthorized", text, headers={"WWW-Authenticate": "Bearer"})

    def _done(self, scope: Scope, job: Job | None, failure: Failure | None, status: int, seconds: float) -> None:
        """Count and log a request for tokens. failure: what was answered, if no answer had begun."""
        metrics, failure = self._service.metrics, failure or (job.failure if job else None)
        metrics.count("tgi_request_count")
        if job is not None and failure is None and job.finish != CANCELLED:
            metrics.answered(job)
        else:
            metrics.failed(failure.kind if failure else CANCELLED)
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
                line |= {"prompt": self._service.prompts.tokenizer.decode(job.request.prompt), "answer": job.text}
        print(json.dumps(line), file=sys.stderr, flush=True)
