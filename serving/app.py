"""The application: routes, what they refuse as JSON of their family, health, metrics, and the page."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from serving import openai_routes, tgi
from serving.answers import Failure
from serving.gate import Gate
from serving.service import Service

PAGE = Path(__file__).with_name("page.html")


def make_app(service: Service, key: str | None, hosts: Collection[str] | None) -> FastAPI:
    """key, hosts: as of `Gate`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.begin()
        yield

    # Without the pages that load scripts from elsewhere.
    app = FastAPI(title="Foretoken", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(tgi.routes(service))
    app.include_router(openai_routes.routes(service))

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        if service.down is not None:
            raise service.down
        return Response()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def page() -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"))

    @app.exception_handler(Failure)
    async def failed(request: Request, error: Failure) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        first: dict[str, Any] = error.errors()[0]
        # Of JSON that breaks off, this is where it does; of unions, it has their members' names.
        names = [] if first["type"] == "json_invalid" else map(str, first["loc"][1:])
        param = ".".join(name for name in names if not name.startswith(("function-", "constrained-", "list[")))
        failure = Failure(422, "validation", f"{param or 'body'}: {first['msg']}", param or None)
        return failure.response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        kinds = {404: "not_found", 405: "method_not_allowed", 408: "timeout", 413: "too_large"}
        kind = kinds.get(error.status_code, "validation")
        return Failure(error.status_code, kind, str(error.detail), headers=error.headers).response(request.url.path)

    app.add_middleware(Gate, service=service, key=key, hosts=hosts)
    return app
