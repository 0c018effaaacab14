"""A connection, and how long it may be open without a request or an answer; what is refused before a request is one."""

import json
from typing import Any

import h11
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.answers import Failure

# What the head of a request has to arrive, and what a request may take beside its own time, for its body: in seconds.
HEAD_SECONDS, BESIDE_SECONDS = 30.0, 45.0
# Of too many connections, the one that has been silent for longest, and for so long, gives way to another.
SILENT_SECONDS = 1.0


async def full(scope: Scope, receive: Receive, send: Send) -> None:
    """An application for whoever connects beside too many."""
    failure = Failure(503, "overloaded", "too many connections: try again later", headers={"Connection": "close"})
    await failure.response(Request(scope))(scope, receive, send)


class Connection(H11Protocol):
    """Ended, with whatever was not read of it, when it is too long without a request or an answer: a client that sends
    or reads nothing would hold it for ever. seconds: what a request may take."""

    def __init__(self, seconds: float, **given: Any) -> None:
        super().__init__(**given)
        self._seconds = seconds
        self._asked: Any = None
        # uvicorn's own answer beyond its limit is no JSON.
        self._served, self._most, self.limit_concurrency = self.app, self.limit_concurrency, None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end = self.loop.call_later(HEAD_SECONDS, transport.abort)
        others: set[Any] = self.connections
        if self._is_full():
            longest = min((one for one in others if one.is_silent), key=lambda one: one._end.when())
            if longest._end.when() < self._end.when() - SILENT_SECONDS:
                longest.transport.abort()

    def _is_full(self) -> bool:
        return self._most is not None and max(len(self.connections), len(self.tasks)) >= self._most

    @property
    def is_silent(self) -> bool:
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def handle_events(self) -> None:
        self.app = full if self._is_full() else self._served
        super().handle_events()
        if self.cycle is not self._asked:
            self._asked = self.cycle
            self._end_after(self._seconds + BESIDE_SECONDS)
        # What lies behind a request waits for its answer; whoever reads no further does not see its client leave.
        if self.flow.read_paused and self.cycle is not None and not self.cycle.more_body:
            if len(self.conn.trailing_data[0]) > HIGH_WATER_LIMIT:
                self.transport.abort()
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """As JSON; in the middle of an answer there is nothing to say any more."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(Failure(400, "validation", msg).body(is_openai=False)).encode()
            head = [("Content-Type", "application/json"), ("Content-Length", f"{len(body)}"), ("Connection", "close")]
            for event in (h11.Response(status_code=400, headers=head), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def on_response_complete(self) -> None:
        self._end_after(HEAD_SECONDS)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)

    def _end_after(self, seconds: float) -> None:
        self._end.cancel()
        self._end = self.loop.call_later(seconds, self.transport.abort)
