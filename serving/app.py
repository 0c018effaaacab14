"""The HTTP application: both families of routes for tokens, health, metrics, the page, keys, and errors as JSON."""

import hmac
import json
import re
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bench.record import rounded
from common.jsonl import why_no_value
from serving.answers import LENGTH, Answer, Events, Failure, Token, batches, best, internal, report, require, stream
from serving.intake import Prompt
from serving.schemas import NEUTRAL, ChatCompletion, Completion, Generate
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
        says = "is not supported by this server"
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


def openai_routes(service: Service) -> APIRouter:
    """Return the routes of OpenAI's API for a language model."""
    router, name = APIRouter(prefix="/v1", tags=["OpenAI"]), service.session.name
    card = {"id": name, "object": "model", "created": service.created, "owned_by": "foretoken"}

    async def respond(http: Request, body: Completion | ChatCompletion, prompts: list[Prompt], *given: Any) -> Any:
        answers, is_chat = await service.begin(http, body, prompts, *given), isinstance(body, ChatCompletion)
        kind, id_ = ("chat.completion", "chatcmpl") if is_chat else ("text_completion", "cmpl")
        head = {"id": f"{id_}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": name}
        if body.stream:
            head |= {"object": "chat.completion.chunk"} if is_chat else {}
            return await stream(_chunks(answers, head, is_chat, body.stream_options.include_usage), is_openai=True)
        async for _ in batches(answers):
            pass
        chosen = best(answers, body.n) if len(answers) > body.n * len(prompts) else answers
        whole = [_choice(each, [*each.prompt, *each.tokens], is_chat, _reason(each)) for each in chosen]
        choices = [{"index": i} | choice for i, choice in enumerate(whole)]
        return head | {"choices": choices, "usage": _usage(answers), **report(answers)}

    @router.post("/completions", response_model=None)
    async def completions(http: Request, body: Completion) -> Any:
        several = isinstance(body.prompt, list) and any(isinstance(each, str | list) for each in body.prompt[:1])
        prompts: Any = body.prompt if several else [body.prompt]
        name, n = ("best_of", body.best_of) if body.best_of else ("n", body.n)
        is_enough, says = body.n <= n <= (body.n if body.stream else n), "best_of is at least n, in a stream equal to n"
        require(is_enough, name, f"is {n}, but `n` is {body.n}: {says}")
        is_scored = body.max_tokens != 0 or (n == 1 and body.echo)
        require(is_scored, "max_tokens", "is 0, which needs `echo` and a single sample of each prompt")
        return await respond(http, body, prompts, (name, n), body.logprobs, body.echo)

    @router.post("/chat/completions", response_model=None)
    async def chat_completions(http: Request, body: ChatCompletion) -> Any:
        messages = [message.for_template() for message in body.messages]
        require(body.logprobs or not body.top_logprobs, "top_logprobs", "needs `logprobs`: true")
        is_possible = body.tool_choice in ("none", "auto") or (body.grammar is None and body.calls().required)
        says = "asks for a call: name a tool of `tools`, and leave out `response_format`"
        require(is_possible, "tool_choice", says)
        return await respond(http, body, [messages], ("n", body.n), body.top_logprobs if body.logprobs else None, False)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @router.get("/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        if model != name:
            raise Failure(404, "model_not_found", f"there is no model {model[:80]}", "model")
        return card

    return router


async def _chunks(answers: Sequence[Answer], head: dict[str, Any], is_chat: bool, has_usage: bool) -> Events:
    head |= {"usage": None} if has_usage else {}
    n_running = len(answers)
    async for i, tokens in batches(answers):
        n_running -= not tokens
        choice = _choice(answers[i], tokens, is_chat, None if tokens else _reason(answers[i]), is_chunk=True)
        parts = [{"delta": {"tool_calls": [part]}, "finish_reason": None} for token in tokens for part in token.calls]
        last = {} if n_running else report(answers)
        yield [head | {"choices": [{"index": i} | each]} | last for each in (choice, *parts)]
    if has_usage:
        yield [head | {"choices": [], "usage": _usage(answers)}]


def _choice(
    answer: Answer, tokens: Sequence[Token], is_chat: bool, reason: str | None = None, is_chunk: bool = False
) -> dict[str, Any]:
    """Return a choice, without its index: some tokens of an answer."""
    has_logprobs, text = answer.has_logprobs, "".join(token.delta for token in tokens)
    if is_chat:
        logprobs: dict[str, Any] = {"content": [_scored(answer, token) for token in tokens]}
        role = {"role": "assistant"} if tokens and tokens[0].index == 0 else {}
        reasoning = "".join(token.reasoning for token in tokens)
        said: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        said |= {"content": text} if tokens and (text or not (reasoning and is_chunk)) else {}
        if (found := answer.tool_calls.found) and not is_chunk:
            calls = [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call} for call in found]
            said |= {"content": text or None, "tool_calls": calls}
        content: dict[str, Any] = {"delta" if is_chunk else "message": role | said}
    else:
        logprobs = {"tokens": [token.text for token in tokens], "token_logprobs": [token.logprob for token in tokens]}
        top = [_top_logprobs(answer, token) for token in tokens] if answer.request.n_top else None
        logprobs |= {"top_logprobs": top, "text_offset": [token.offset for token in tokens]}
        content = {"text": text}
    return {**content, "logprobs": logprobs if has_logprobs else None, "finish_reason": reason}


def _scored(answer: Answer, token: Token) -> dict[str, Any]:
    """Return a token with its log-probability and the likeliest tokens in its place, as in OpenAI's chats."""
    scored = [(token.text, token.logprob), *((text, value) for _, text, value in answer.likeliest(token))]
    chosen, *top = [{"token": text, "logprob": value, "bytes": [*text.encode()]} for text, value in scored]
    return chosen | {"top_logprobs": top}


def _top_logprobs(answer: Answer, token: Token) -> dict[str, float | None] | None:
    """Return log-probabilities of the likeliest tokens and the token itself, as in OpenAI's completions."""
    scored = {token.text: token.logprob} | {text: value for _, text, value in reversed(answer.likeliest(token))}
    return None if token.logprob is None else scored  # of tokens with the same text, the likeliest counts


def _reason(answer: Answer) -> str:
    return "length" if answer.finish == LENGTH else "tool_calls" if answer.tool_calls.found else "stop"


def _usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the number of tokens, with each prompt counted once."""
    prompts = [answer.request for answer in answers if answer.request.index == answer.request.group]
    n_prompt, n_new = sum(len(request.prompt) for request in prompts), sum(len(answer.tokens) for answer in answers)
    usage: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
    if prompts and prompts[0].prediction:
        accepted = sum(answer.predicted_accepted for answer in answers)
        predicted = sum(answer.predicted for answer in answers)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}
        usage["completion_tokens_details"] = details
    return usage | {"prompt_tokens_details": {"cached_tokens": sum(request.n_reused for request in prompts)}}


def tgi_routes(service: Service) -> APIRouter:
    """Return the routes of text-generation-inference."""
    router = APIRouter(tags=["text-generation-inference"])

    async def respond(http: Request, body: Generate, streams: bool) -> Response | dict[str, Any]:
        spec = body.parameters
        has_prefill, samples = spec.decoder_input_details, ("parameters.best_of", spec.best_of)
        name = "decoder_input_details" if has_prefill else "best_of"
        is_possible = not streams or not (has_prefill or spec.best_of > 1)
        require(is_possible, f"parameters.{name}", "is not possible in a stream")
        has_details = spec.details or has_prefill or spec.top_n_tokens > 0
        prompt: Prompt = [{"role": "user", "content": body.inputs}] if spec.chat else body.inputs
        n_top = spec.top_n_tokens if streams or has_details else None
        answers = await service.begin(http, spec, [prompt], samples, n_top, has_prefill)
        prefix = body.inputs if spec.return_full_text else ""
        if streams:
            return await stream(_tgi_events(answers[0], prefix), is_openai=False)
        async for _ in batches(answers):
            pass
        (text, details), *others = [(prefix + each.text, _whole_details(each)) for each in best(answers, spec.best_of)]
        if others:
            details["best_of_sequences"] = [{"generated_text": other} | rest for other, rest in others]
        return {"generated_text": text} | ({"details": details} if has_details else {})

    @router.post("/generate", response_model=None)
    async def generate(http: Request, body: Generate) -> Response | dict[str, Any]:
        return await respond(http, body, body.stream)

    @router.post("/generate_stream", response_model=None)
    async def generate_stream(http: Request, body: Generate) -> Response | dict[str, Any]:
        return await respond(http, body, True)

    @router.post("/", response_model=None)
    async def generate_or_stream(http: Request, body: Generate) -> Response | list[Any]:
        answer = await respond(http, body, body.stream)
        return answer if isinstance(answer, Response) else [answer]

    @router.get("/info")
    async def info() -> dict[str, Any]:
        plan, limits, runner, drafts = service.plan, service.limits, service.session.runner, service.plan.candidates
        return {
            "model_id": service.session.name,
            "model_sha": plan.target.source.manifest_sha256,
            "model_dtype": str(plan.target.weights.dtype),
            "model_device_type": runner.device.type,
            "max_concurrent_requests": runner.max_batch + limits.max_queue,
            "max_stop_sequences": limits.max_stop_sequences,
            "max_input_tokens": service.intake.max_input,
            "max_total_tokens": service.intake.max_total,
            "max_new_tokens": limits.max_new_tokens,
            "max_batch_size": runner.max_batch,
            "chat": service.intake.template is not None,
            "verification": service.scheduler.verification,
            "plain_requests": not limits.no_plain_requests,
            "speculation": {"draft": drafts[0].config.kind, "gamma": plan.gamma, "auto": bool(plan.automatic)}
            if drafts
            else None,
            "version": "0.1.0",
        }

    return router


async def _tgi_events(answer: Answer, prefix: str) -> Events:
    async for _, tokens in batches([answer]):
        events, rate = [], rounded(answer.counts.acceptance_rate)
        for token in tokens:
            speculation = {"drafted": token.drafted, "round": token.round, "acceptance_rate": rate}
            event = {"index": token.index + 1, "token": _tgi_token(token), "top_tokens": _top_tokens(answer, token)}
            events.append(event | {"speculation": speculation, "generated_text": None, "details": None})
        if tokens and answer.finish is not None and answer.failure is None and tokens[-1] is answer.tokens[-1]:
            events[-1] |= {"generated_text": prefix + answer.text, "details": _details(answer)}
        yield events


def _tgi_token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.delta, "logprob": token.logprob, "special": token.special}


def _top_tokens(answer: Answer, token: Token) -> list[dict[str, Any]]:
    return [{"id": i, "text": t, "logprob": p, "special": i in answer.specials} for i, t, p in answer.likeliest(token)]


def _details(answer: Answer) -> dict[str, Any]:
    lengths = {"generated_tokens": len(answer.tokens), "input_length": len(answer.request.prompt)}
    return {"finish_reason": answer.finish, **lengths, **report([answer])}


def _whole_details(answer: Answer) -> dict[str, Any]:
    """Return details with the tokens of an answer that is not streamed."""
    prefill = [{"id": token.id, "text": token.text, "logprob": token.logprob} for token in answer.prompt]
    top = {"top_tokens": [_top_tokens(answer, token) for token in answer.tokens]} if answer.request.n_top else {}
    return _details(answer) | {"prefill": prefill, "tokens": [*map(_tgi_token, answer.tokens)], **top}
