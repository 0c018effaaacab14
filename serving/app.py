"""The HTTP application: both families of routes, health, metrics, the page, keys, and errors as JSON."""

import hmac
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.jsonl import why_no_value
from serving.answers import Failure, internal
from serving.routes import openai_routes, tgi_routes
from serving.schemas import NEUTRAL
from serving.service import Service

PAGE = Path(__file__).with_name("page.html")
# What needs no key: GET and HEAD of these paths.
OPEN_METHODS, OPEN_PATHS = ("GET", "HEAD"), ("/health", "/")
# OpenAI's codes for kinds of pydantic's errors.
CODES = {"extra_forbidden": "unsupported_parameter", "missing": "missing_required_parameter"}
KINDS = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def make_app(service: Service, key: str | None, hosts: Sequence[str]) -> FastAPI:
    """Make the application. key: the key that requests have to bring, except for /health and the page. hosts: names of
    this machine that the Host header may have, "*" for any name; requests with the key may have any. A page on the web
    can have its name lead here."""
    # FastAPI's documentation pages load scripts from other sites.
    app = FastAPI(docs_url=None, redoc_url=None, title="Foretoken")

    @app.api_route("/health", methods=["GET", "HEAD"], include_in_schema=False)
    async def health() -> Response:
        service.require_health()
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    async def on_error(request: Request, error: Exception) -> Response:
        request.state.failure = failure = _failure_of(error)
        return error_response(failure, request.url.path)

    for kind in (Failure, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    for router in (tgi_routes(service), openai_routes(service)):
        app.include_router(router)
    # Behind Accounting, which answers by itself for a length that the headers say.
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=service.limits.max_body_bytes)
    app.add_middleware(Accounting, service=service, key=key, hosts=hosts)
    return app


def error_response(failure: Failure, path: str) -> Response:
    """Return a failure in the JSON format of the path's family of routes."""
    is_openai = path.startswith("/v1")
    status = 400 if is_openai and failure.status == 422 else failure.status
    return JSONResponse(failure.body(is_openai), status, failure.headers)


def _failure_of(error: Exception) -> Failure:
    """Return the failure for any exception. If several fields are wrong, it names the most deeply nested."""
    if isinstance(error, HTTPException) and error.status_code == 400:  # FastAPI could not decode the body
        return Failure(422, "validation", f"body: {why_no_value(error.__cause__)}")
    if isinstance(error, HTTPException):
        return Failure(error.status_code, KINDS.get(error.status_code, "validation"), error.detail, None, error.headers)
    if not isinstance(error, RequestValidationError):
        return error if isinstance(error, Failure) else internal(error)
    if isinstance(error.body, bytes):
        return Failure(422, "validation", "body: send JSON with `Content-Type: application/json`")
    field, wrong = max(((_field(wrong["loc"]), wrong) for wrong in error.errors()), key=lambda pair: len(pair[0]))
    if wrong["type"] == "json_invalid":
        return Failure(422, "validation", f"body: no JSON: {wrong['ctx']['error']} at character {wrong['loc'][1]}")
    says, code = wrong["msg"].removeprefix("Value error, "), CODES.get(wrong["type"])
    if wrong["type"] == "extra_forbidden":
        is_second = field == ["max_tokens"]  # all routes have this field, unless its other name is given
        says = "means max_completion_tokens, which is given too" if is_second else "is not supported by this server"
        if values := NEUTRAL.get(field[-1]):
            says = f"is not supported, but for {' or '.join(map(json.dumps, values))}"
    elif isinstance(wrong["input"], str | int | float):
        says += f", not {json.dumps(wrong['input'])[:80]}"
    return Failure(422, "validation", f"{'.'.join(field) or 'body'}: {says}", ".".join(field) or None, code=code)


def _field(location: Sequence[str | int]) -> list[str]:
    """Return the path of a wrong field, without the names of types that pydantic adds for a union."""
    return [name for name in map(str, location[1:]) if not name.startswith(("constrained-", "list["))]


class Accounting:
    """Middleware that refuses requests by their headers, counts and logs requests for tokens, and frees the row of a
    request that is over. key, hosts: as in `make_app`."""

    def __init__(self, app: ASGIApp, service: Service, key: str | None, hosts: Sequence[str]) -> None:
        self._app, self._service, self._key, self._hosts = app, service, key, hosts

    def _refusal(self, scope: Scope) -> Failure | None:
        """Return why a request is refused by its headers, or None."""
        headers, largest = Headers(scope=scope), self._service.limits.max_body_bytes
        scheme, _, said = headers.get("authorization", "").partition(" ")
        is_known = hmac.compare_digest(said.strip(" ").encode("latin-1"), (self._key or "").encode())
        has_key = self._key is not None and scheme.lower() == "bearer" and is_known
        is_open = self._key is None or (scope["method"] in OPEN_METHODS and scope["path"] in OPEN_PATHS)
        if not (has_key or is_open):
            wants = {"WWW-Authenticate": "Bearer"}
            return Failure(401, "unauthorized", "this server wants a key: Authorization: Bearer KEY", headers=wants)
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if not has_key and "*" not in self._hosts and host not in self._hosts:
            return Failure(400, "validation", f"the Host header is {host[:80]!r}: use an address of this machine")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > largest:
            return Failure(413, "too_large", f"body: {length} bytes, at most {largest} are taken")
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = time.perf_counter(), 0
        state = scope["state"] = {**scope.get("state", {}), "answers": [], "failure": None}

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        refusal = self._refusal(scope) if scope["type"] == "http" else None
        state["failure"] = refusal
        try:
            await (error_response(refusal, scope["path"]) if refusal else self._app)(scope, receive, note)
        except Exception as error:
            state["failure"], status = state["failure"] or internal(error), status or 500
            raise
        finally:
            if scope.get("method") == "POST":
                seconds = time.perf_counter() - started
                self._service.close(scope["path"], state["answers"], state["failure"], status, seconds)
