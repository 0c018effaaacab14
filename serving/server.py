"""From flags to a server: the model's rounds run on this thread, HTTP on another one, of the leading rank."""

import asyncio
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address

import uvicorn

from common.errors import ConfigError, flag
from common.process import is_leader, world_size
from common.say import say
from serving.app import make_app
from serving.connection import Connection
from serving.flags import ServeFlags
from serving.opening import open_session
from serving.scheduler import Scheduler
from serving.service import Service

# What answers that are done have to be written, in seconds.
FLUSH_SECONDS = 5
# Connections beside those of requests that decode or wait: for the page, metrics and bodies that are on their way.
SPARE_CONNECTIONS = 64
STOPPING = (signal.SIGTERM, signal.SIGINT)


def serve(flags: ServeFlags) -> None:
    """Until SIGTERM or Ctrl-C, and the end of what was asked before. Errors: UserError; what the engine raises."""
    scheduler, server = open_server(flags)
    if server is not None:
        server.start()
    # Of several ranks the leader's word counts.
    with _signals((lambda: server.end(flags.http.drain_seconds)) if server else (lambda: None)):
        (server or scheduler).run()


def open_server(flags: ServeFlags) -> tuple[Scheduler, "Server | None"]:
    """Everything but listening and decoding; of several ranks the first has a server. Errors: UserError."""
    config = flags.config()
    sock = _bound(flags.http.host, flags.http.port) if is_leader() else None
    session, pacing = open_session(config, flags.batch.max_batch, flags.batch.max_length)
    scheduler = Scheduler(session, pacing, flags.batch)
    return scheduler, Server(Service(flags, session, scheduler), sock) if sock else None


class Server:
    """A service on the socket, by uvicorn on a thread of its own, which leaves signals alone."""

    def __init__(self, service: Service, sock: socket.socket) -> None:
        self.service, self._sock = service, sock
        flags, key = service.flags, service.flags.http.key()
        is_local = key is None and ip_address(sock.getsockname()[0]).is_loopback
        hosts = dict.fromkeys(["127.0.0.1", "localhost", "[::1]", flags.http.host]) if is_local else None
        self._thread = threading.Thread(target=self._listen, name="http", daemon=True)
        config = uvicorn.Config(
            make_app(service, key, hosts),
            http=partial(Connection, flags.limits.request_seconds),  # type: ignore[arg-type]
            limit_concurrency=flags.batch.max_batch + flags.limits.max_queue + SPARE_CONNECTIONS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        self._http = uvicorn.Server(config)

    @property
    def url(self) -> str:
        address, port = self._sock.getsockname()[:2]
        return f"http://{f'[{address}]' if ':' in address else address}:{port}"

    def start(self) -> None:
        """Returns when clients can connect."""
        self._sock.listen()
        self._thread.start()

    def run(self) -> None:
        """Decode on this thread until the end. Errors: what the engine raises, when all clients have been told."""
        service = self.service
        room = service.session.plan.capacity
        clamped = room < service.flags.batch.max_length
        how = f" (--max_length {room}, which is the model's context)" if clamped else ""
        say(f"serving {service.session.name} on {self.url}{how}")
        try:
            service.scheduler.run()
            if not self._http.should_exit:
                raise RuntimeError("the HTTP server ended by itself")
        except BaseException as error:
            failed = f"the engine has failed ({type(error).__name__}), and the server ends"
            is_ended = isinstance(error, KeyboardInterrupt)
            service.run_soon(service.fail, "the server was ended at once" if is_ended else failed)
            self.end(0)
            raise
        finally:
            self._thread.join(FLUSH_SECONDS)

    def end(self, drain_seconds: float) -> None:
        """Drain, then end; for another thread than HTTP's, and returns at once."""

        async def drain() -> None:
            await self.service.drain(drain_seconds)
            self._http.should_exit = True

        self.service.run_soon(lambda: self.service.keep(drain()))

    def _listen(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.service.loop) as runner:
                runner.run(self._http.serve([self._sock]))
        finally:
            self.service.scheduler.stop()


def _bound(host: str, port: int) -> socket.socket:
    """Errors: ConfigError if nothing can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        where, required = f"{flag('host')}, {flag('port')}", "an address of this machine, and a port that is free"
        of_port = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        seen, fix = f"{host}, {port}: {error}", f"use {flag('port')} 0" if of_port else f"leave out {flag('host')}"
        raise ConfigError("the server cannot listen there", where, seen, required, fix) from None
    return sock


@contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    """The first one calls `end`; of a process alone, a second Ctrl-C ends it at once. A second SIGTERM does not: a
    group's comes from its sender, and again from a `make` among them. torchrun sends one to the ranks that are left
    when a rank has died: whoever fails then ends by it, as nobody waits for another word."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if number == signal.SIGINT and received.count(number) > 1 and world_size() == 1:
            raise KeyboardInterrupt
        if len(received) == 1:
            end()

    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received and world_size() > 1:
            signal.raise_signal(received[0])
        raise
