"""A connection, and how long it may be open without a request or an answer."""

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# What the head of a request has to arrive, and what a request may take beside its own time, for its body: in seconds.
HEAD_SECONDS, BESIDE_SECONDS = 30.0, 45.0
# Of too many connections, the one that has been silent for longest, and for so long, gives way to another.
SILENT_SECONDS = 1.0


class Connection(H11Protocol):
    """Ended, with whatever was not read of it, when it is too long without a request or an answer: a client that sends
    or reads nothing would hold it for ever. seconds: what a request may take."""

    def __init__(self, seconds: float, **given: Any) -> None:
        super().__init__(**given)
        self._seconds = seconds
        self._asked: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._end = self.loop.call_later(HEAD_SECONDS, transport.abort)
        others: set[Any] = self.connections
        if len(others) >= (self.limit_concurrency or 0):
            longest = min((one for one in others if one.is_silent), key=lambda one: one._end.when())
            if longest._end.when() < self._end.when() - SILENT_SECONDS:
                longest.transport.abort()

    @property
    def is_silent(self) -> bool:
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not self._asked:
            self._asked = self.cycle
            self._end_after(self._seconds + BESIDE_SECONDS)

    def on_response_complete(self) -> None:
        self._end_after(HEAD_SECONDS)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        super().connection_lost(exc)

    def _end_after(self, seconds: float) -> None:
        self._end.cancel()
        self._end = self.loop.call_later(seconds, self.transport.abort)
