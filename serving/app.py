"""The application: routes, what they refuse as JSON of their family, health, metrics, and the page."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from serving import openai_routes, tgi
from serving.answers import TOO_LONG, Failure
from serving.gate import Gate
from serving.service import Service

# A step takes a chunk of a prompt, and a round.
HUNG_SECONDS = 120.0
PAGE = Path(__file__).with_name("page.html")


def _told(error: dict[str, Any]) -> tuple[list[str], str, str]:
    """Return the path of an error, its message, and pydantic's type. For broken JSON `loc` is a character's number; for
    a union it contains the names of the union's members."""
    if error["type"] == "json_invalid":
        return [], f"is no JSON: {error['ctx']['error']} at character {error['loc'][1]}", error["type"]
    names = [name for name in map(str, error["loc"][1:]) if not name.startswith(("function-", "constrained-", "list["))]
    return names, error["msg"].removeprefix("Value error, "), error["type"]


def make_app(service: Service, key: str | None, hosts: Collection[str] | None) -> FastAPI:
    """key, hosts: as of `Gate`."""
    # Without the pages that load scripts from elsewhere.
    app = FastAPI(title="Foretoken", docs_url=None, redoc_url=None)
    app.include_router(tgi.routes(service))
    app.include_router(openai_routes.routes(service))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        service.require_up()
        if (seconds := service.scheduler.step_seconds) > HUNG_SECONDS:
            raise Failure(503, "unavailable", f"the engine has not ended a step for {seconds:.0f} seconds")
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.head("/", include_in_schema=False)
    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    @app.exception_handler(Failure)
    async def failed(request: Request, error: Failure) -> Response:
        return error.response(request)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        if isinstance(error.body, bytes) and error.body:
            return Failure(415, "validation", "the Content-Type has to be application/json").response(request)
        errors = [*map(_told, error.errors())]
        about = errors[0][0]
        # A field that may be a text or a list has errors for both: the list's are about its items, or its length.
        same = (one for one in errors if one[0][: len(about)] == about)
        names, says, type_ = max(same, key=lambda one: (len(one[0]), one[2] == "too_long"))
        param, kind = ".".join(names), TOO_LONG if (names, type_) == (["prompt"], "too_long") else "validation"
        return Failure(422, kind, f"{param or 'body'}: {says}", param or None).response(request)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        kinds = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "too_large"}
        kind = kinds.get(error.status_code, "validation")
        # FastAPI does not say why a body cannot be read: no UTF-8, too deep, or numbers too long.
        text = f"body: {error.__cause__}" if error.__cause__ else str(error.detail)
        return Failure(error.status_code, kind, text, headers=error.headers).response(request)

    app.add_middleware(Gate, service=service, key=key, hosts=hosts)
    return app
