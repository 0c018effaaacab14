"""From flags to a server: the model's rounds run on this thread, HTTP on another one, of the leading rank."""

import os
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from common.errors import ConfigError, flag
from common.process import is_leader, world_size
from common.say import say
from serving.app import make_app
from serving.failures import Failure
from serving.flags import API_KEY, ServeFlags
from serving.opening import open_session
from serving.scheduler import Scheduler
from serving.service import Service

# What answers that are done have to be written, in seconds.
FLUSH_SECONDS = 5
STOPPING = (signal.SIGTERM, signal.SIGINT)


def serve(flags: ServeFlags) -> None:
    """Until SIGTERM or Ctrl-C, and the end of what was asked before. Errors: UserError; what the engine raises."""
    config = flags.config()
    sock = _bound(flags.http.host, flags.http.port) if is_leader() else None
    session, pacing = open_session(config, flags.batch.max_batch, flags.batch.max_length)
    scheduler = Scheduler(session, pacing, flags.batch.verification)
    if sock is None:
        for number in STOPPING:  # the leader's word counts
            signal.signal(number, signal.SIG_IGN)
        scheduler.run(lambda updates: None)
        return
    service = Service(flags, session, scheduler)
    http = HttpThread(service, sock)
    http.start()
    address, port = sock.getsockname()[:2]
    say(f"serving {session.name} on http://{address}:{port}")
    _on_signals(lambda: http.end(flags.http.drain_seconds))
    try:
        scheduler.run(lambda updates: service.run_soon(service.told, updates))
    except BaseException as error:
        text = "the engine has failed; the server is going down"
        service.run_soon(service.fail, Failure(503, "unavailable", f"{text} ({type(error).__name__})"))
        http.end(0)
        raise
    finally:
        http.thread.join(FLUSH_SECONDS)


class HttpThread:
    """uvicorn on a thread of its own, which leaves signals alone."""

    def __init__(self, service: Service, sock: socket.socket) -> None:
        self._service, self._sock, self._scheduler = service, sock, service.scheduler
        key = service.flags.http.api_key or os.environ.get(API_KEY) or None
        how: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "on", "server_header": False}
        how["timeout_graceful_shutdown"] = FLUSH_SECONDS
        self._server = uvicorn.Server(uvicorn.Config(make_app(service, key), **how))
        self.thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        """Returns when it listens."""
        self.thread.start()
        self._service.ready.wait()

    def _run(self) -> None:
        try:
            self._server.run([self._sock])
        finally:
            self._scheduler.stop()

    def end(self, drain_seconds: float) -> None:
        """Drain, then end; from another thread, and returns at once."""

        async def drain() -> None:
            await self._service.drain(drain_seconds)
            self._server.should_exit = True

        self._service.run_soon(lambda: self._service.keep(drain()))


def _bound(host: str, port: int) -> socket.socket:
    """Errors: ConfigError if nothing can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        where, required = f"{flag('host')}, {flag('port')}", "an address of this machine, and a port that is free"
        seen, fix = f"{host}, {port}: {error}", f"use {flag('port')} 0"
        raise ConfigError("the server cannot listen there", where, seen, required, fix) from None
    return sock


def _on_signals(end: Callable[[], None]) -> None:
    """The first one ends the server in good order. Of a process alone, a second Ctrl-C ends it at once; of several, all
    get each signal more than once."""

    def stop(number: int, frame: object) -> None:
        for one in STOPPING:
            signal.signal(one, signal.SIG_IGN if world_size() > 1 else signal.default_int_handler)
        end()

    for number in STOPPING:
        signal.signal(number, stop)
