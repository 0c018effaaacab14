"""The command line of the server, and its process: rounds run on the main thread, HTTP on another of the first rank."""

import asyncio
import errno
import os
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from types import FrameType
from typing import Annotated, Any, ClassVar, Literal

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from tyro.conf import arg

from bench.config import RankOptions, RunConfig, Sampling, Target
from bench.draft_flags import DraftFlags
from bench.session import Session
from common.errors import flag, refuse, require_at_least
from common.flags import Given
from common.jsonl import require_appendable
from common.process import is_leader, world_size
from common.say import say
from engine.drafters.config import AUTO, Trait
from serving.answers import Failure
from serving.app import error_response, make_app
from serving.intake import Intake, Limits
from serving.scheduler import Batch, Scheduler, open_session
from serving.schemas import sampling_defaults
from serving.service import Service

API_KEY = "FORETOKEN_API_KEY"
# Seconds that finished answers have to be written.
FLUSH_SECONDS = 5
# The answer to requests that come before the model is loaded.
LOADING = Failure(503, "unavailable", "the model is being loaded: try again later", headers={"Retry-After": "5"})
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class ServedDraft(DraftFlags):
    """The draft: its kind, storage and length."""

    USUAL: ClassVar[Mapping[str, Any]] = {"gamma": AUTO}

    gamma: Given[int | Literal["auto"]] = None
    """tokens drafted per round; auto, the default unless --draft names a length: 0 to 6, what pays best by the costs
    measured when the server starts and the acceptance seen so far, chosen before every round; 0: plain decoding"""
    draft_ranks: Given[tuple[int, ...]] = None
    """standalone: ranks that share the draft (default: those of --rank_group)"""


@dataclass(frozen=True)
class Http:
    """The address, and which requests are answered."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0 for other machines, too
    port: int = 8000  # 0: any free port
    api_key: Annotated[str | None, arg(help_behavior_hint=f"(default: ${API_KEY}, or none)")] = None
    """the key that requests bring as `Authorization: Bearer KEY`, except for /health and the page; give it in the
    environment, since other processes can read command lines"""
    log_prompts: bool = False  # log prompts and answers, too
    drain_seconds: float = 20
    """after SIGTERM or Ctrl-C: seconds that requests have to finish; torchrun itself waits for 30"""

    def key(self) -> str | None:
        """Return the key that requests have to bring. Errors: ConfigError for a key that is empty, or that no header
        can carry."""
        key = os.environ.get(API_KEY) if self.api_key is None else self.api_key
        if key is not None and not (key.strip() and key.isprintable()):
            seen = repr("".join(char for char in key if not char.isprintable()) or key)  # a message shows no secret
            required = "printable characters, which a header can carry"
            fix = "take these characters out" if key.strip() else f"unset {API_KEY} to serve without a key"
            refuse(f"{flag('api_key')} or ${API_KEY}", seen, required, "clients cannot bring this key", fix)
        return key and key.strip()

    def bind(self) -> socket.socket:
        """Return a socket that listens on the address. Errors: ConfigError if nothing can listen there."""
        try:
            family, *_ = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0]
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # :: is for IPv4, too
            return socket.create_server((self.host, self.port), family=family, dualstack_ipv6=is_dual)
        except (OSError, UnicodeError) as error:
            what, seen = "the server cannot listen there", f"{self.host}, {self.port}: {error}"
            if isinstance(error, socket.gaierror | UnicodeError) or getattr(error, "errno", 0) == errno.EADDRNOTAVAIL:
                refuse("host", seen, "an address of this machine", what, f"leave out {flag('host')}")
            refuse("port", seen, "a port that is free", what, f"use {flag('port')} 0, which is any free port")


@dataclass(frozen=True, kw_only=True)
class Serve:
    """an HTTP server with the routes of text-generation-inference and OpenAI, over speculative decoding"""

    FLAGS: ClassVar[dict[str, str]] = {"draft_model": "--draft", "B": "--max_batch", "prefix_len": "--max_length"}

    target: Target = field(default_factory=Target)
    draft: ServedDraft = field(default_factory=ServedDraft)
    batch: Batch = field(default_factory=Batch)
    http: Http = field(default_factory=Http)
    limits: Limits = field(default_factory=Limits)
    ranks: RankOptions = field(default_factory=RankOptions)
    no_sampling_defaults: bool = False
    """do not take what a request leaves out (temperature, filters, length) from the model's generation_config.json"""

    def config(self) -> RunConfig:
        """Return the run that a session is opened for. Errors: ConfigError, also for what cannot be served."""
        self._check()
        (drafts,) = self.draft.choices({"draft": "self"} if self.draft.gamma == 0 else {})  # notes flags without effect
        drafts = () if self.draft.gamma == 0 else drafts
        if needing := [draft.kind for draft in drafts if Trait.NEEDS_BASELINE in draft.traits]:
            what = "this draft needs the answer of plain decoding"
            refuse("draft", needing[0], "a draft that can be served, such as self", what, f"leave out {flag('draft')}")
        sharing = [draft.kind for draft in drafts if Trait.SHARES_TEXTS in draft.traits]
        if sharing and self.batch.no_prefix_reuse:
            where, what = f"{flag('draft')}, {flag('text_drafts')}", "this draft takes its guesses from all requests"
            required = f"drafts from the text of the row, with {flag('no_prefix_reuse')}"
            refuse(where, sharing[0], required, what, f"use suffix without {flag('keep_answers')}")
        run = RunConfig(target=self.target, sampling=Sampling(verification=self.batch.verification), ranks=self.ranks)
        return run.with_drafts(*drafts)

    def _check(self) -> None:
        values = vars(self.limits) | vars(self.batch) | {"drain_seconds": self.http.drain_seconds}
        least = {"max_queue": 0, "request_seconds": 0.001, "drain_seconds": 0}
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                require_at_least(name, value, least.get(name, 1))
        require_at_least("port", self.http.port, 0, 65535)
        self.target.require_trained()
        if self.ranks.data_parallel != 1:
            what, fix = "a server has one copy of the model", "start a server for every replica"
            refuse("data_parallel", self.ranks.data_parallel, 1, what, fix)
        require_appendable(self.batch.log_verification, "log_verification")
        self.http.key()

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C and the end of the requests before it. Errors: UserError; whatever the engine
        raises."""
        scheduler, server = open_server(self)
        received: list[int] = []

        def on_signal(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT and number in received and world_size() == 1:
                raise KeyboardInterrupt
            # Of several ranks the leader decides. Only the first signal counts: `make` repeats that of its group.
            if server is not None and not received:
                server.drain(self.http.drain_seconds)
            received.append(number)

        for number in SIGNALS:
            signal.signal(number, on_signal)
        try:
            (server or scheduler).run()
        except BaseException:
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            # torchrun ends the other ranks when a rank has died, and nobody waits for their errors.
            if received and world_size() > 1:
                signal.raise_signal(received[0])
            raise


def open_server(flags: Serve) -> tuple[Scheduler, "Server | None"]:
    """Open the session, its scheduler, and on the first rank the server. Errors: UserError."""
    config = flags.config()
    defaults = {} if flags.no_sampling_defaults else sampling_defaults(config.target.source())
    server = Server(flags) if is_leader() else None
    try:
        session, controller = open_session(config, flags.batch)
        scheduler = Scheduler(session, controller, flags.batch)
        if server is not None:
            server.open(session, scheduler, defaults)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return scheduler, server


def report_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Print an error of the event loop, on a line if connections wait for descriptors."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        say(f"connections wait: {error.strerror}; see `ulimit -n`")
    else:
        loop.default_exception_handler(context)


class Listener(uvicorn.Server):
    """A uvicorn server that accepts connections one by one. Without descriptors, asyncio reports an error and schedules
    another try for every connection that it may accept at once."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        queue_length, self.config.backlog = self.config.backlog, 1
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(queue_length)


class Server:
    """A service on a socket, by uvicorn on another thread. Listens at once, and refuses requests until `open`."""

    service: Service

    def __init__(self, flags: Serve) -> None:
        self._flags, self._sock, self._loop = flags, flags.http.bind(), asyncio.new_event_loop()
        self._app: ASGIApp | None = None
        seconds = int(flags.http.drain_seconds) + FLUSH_SECONDS
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
        how = {"interface": "asgi3", "timeout_graceful_shutdown": seconds, **quiet}
        self._http = Listener(uvicorn.Config(self._answer, **how))
        self._loop.set_exception_handler(report_error)
        self._thread = threading.Thread(target=self._listen, name="http", daemon=True)
        self._thread.start()
        say(f"listening on {self.url}, which answers 503 until the model is loaded")

    def open(self, session: Session, scheduler: Scheduler, defaults: Mapping[str, Any]) -> None:
        """Answer requests from now on, when `run` decodes. defaults: values of fields that a request does not give."""
        http = self._flags.http
        intake = Intake(session, scheduler.verification, self._flags.limits, defaults)
        self.service = Service(session, scheduler, intake, http.log_prompts, self._loop)
        if defaults:
            given = ", ".join(f"{name} {value}" for name, value in defaults.items())
            say(f"requests without these fields take generation_config.json's: {given} (--no_sampling_defaults)")
        is_local = ip_address(self._sock.getsockname()[0]).is_loopback
        hosts = ["127.0.0.1", "localhost", "[::1]", http.host] if is_local else ["*"]
        self._app = make_app(self.service, http.key(), hosts)
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server ended by itself")

    def close(self) -> None:
        """Refuse new connections, and wait until HTTP has ended."""
        self._http.should_exit = True
        self._thread.join(FLUSH_SECONDS)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self._app or error_response(LOADING, scope["path"]))(scope, receive, send)

    @property
    def url(self) -> str:
        address, port = self._sock.getsockname()[:2]
        return f"http://{f'[{address}]' if ':' in address else address}:{port}"

    def run(self) -> None:
        """Decode on this thread until the end. Errors: whatever the engine raises, after all clients got an error."""
        service = self.service
        say(f"serving {service.session.name} on {self.url}")
        try:
            service.scheduler.run()
            if not self._http.should_exit:
                raise RuntimeError("the HTTP server ended by itself")
        except BaseException as error:
            service.call(service.fail, f"the server has ended ({type(error).__name__})")
            raise
        finally:
            self.close()

    def drain(self, seconds: float) -> None:
        """Refuse new connections, and end after some seconds or when all requests have ended. Returns at once."""
        why = f"not done within {seconds} seconds of the server's shutting down"
        self.service.call(self._loop.call_later, seconds, self.service.fail, why)
        self._http.should_exit = True

    def _listen(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._http.serve([self._sock]))
        finally:
            if self._app is not None:
                self.service.scheduler.stop()
