"""The routes of OpenAI's API that a server of one language model has."""

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from serving.answers import Events, Failure, stream
from serving.jobs import LENGTH, Job, Piece
from serving.prompts import Wanted
from serving.schemas import ChatCompletion, Completion, TextCompletion
from serving.service import Service

# What the API gives a completion that says nothing of its length.
COMPLETION_TOKENS = 16


def routes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["OpenAI"])

    @router.post("/completions")
    async def completions(request: Request, body: TextCompletion) -> Response:
        prompt, has_logprobs = body.prompt, body.logprobs is not None
        n_chars = len(prompt) if isinstance(prompt, str) else 0

        def encode() -> list[int]:
            return service.prompts.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

        n_new, most = body.max_tokens, COMPLETION_TOKENS
        wanted = Wanted(body, encode, n_chars, n_new, "prompt", logprobs=has_logprobs, most_unasked=most)
        return await _answer(service, request, body, wanted, Text)

    @router.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatCompletion) -> Response:
        messages = [{"role": one.role, "content": one.text} for one in body.messages]
        encode = service.prompts.conversation(messages, "messages")
        n_chars = sum(len(one["content"]) for one in messages)
        length = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        n_new, has_logprobs = getattr(body, length), bool(body.logprobs)
        wanted = Wanted(body, encode, n_chars, n_new, of_prompt="messages", of_length=length, logprobs=has_logprobs)
        return await _answer(service, request, body, wanted, Chat)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.session.name:
            raise Failure(404, "model_not_found", f"there is no model {name[:80]}", "model")
        return _model(service)

    return router


def _model(service: Service) -> dict[str, Any]:
    return {"id": service.session.name, "object": "model", "created": service.created, "owned_by": "foretoken"}


class Text:
    """An answer of /v1/completions, whole or in chunks."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, service: Service, job: Job) -> None:
        self._has_logprobs, self._n_shown = job.request.logprobs is not None, 0
        self.head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
        self.head |= {"model": service.session.name, "system_fingerprint": "foretoken"}

    def choice(self, pieces: Sequence[Piece], reason: str | None, is_chunk: bool = True) -> dict[str, Any]:
        logprobs = self.logprobs(pieces) if self._has_logprobs else None
        return {"index": 0, **self.said(pieces, is_chunk), "logprobs": logprobs, "finish_reason": reason}

    def said(self, pieces: Sequence[Piece], is_chunk: bool) -> dict[str, Any]:
        return {"text": _shown(pieces)}

    def logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        *offsets, self._n_shown = accumulate((len(piece.shown) for piece in pieces), initial=self._n_shown)
        tokens, values = [piece.text for piece in pieces], [piece.logprob for piece in pieces]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


class Chat(Text):
    """The same of /v1/chat/completions."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _begun = False

    def said(self, pieces: Sequence[Piece], is_chunk: bool) -> dict[str, Any]:
        role = {} if self._begun else {"role": "assistant"}
        self._begun = True
        content = {"content": _shown(pieces)} if pieces or not is_chunk else {}
        return {"delta" if is_chunk else "message": role | content}

    def logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        each = [{"token": one.text, "logprob": one.logprob, "bytes": [*one.text.encode()]} for one in pieces]
        return {"content": [one | {"top_logprobs": []} for one in each]}


async def _answer(service: Service, request: Request, body: Completion, wanted: Wanted, kind: type[Text]) -> Response:
    job = await service.submit(request, wanted)
    form = kind(service, job)
    if body.stream:
        wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        return await stream(_chunks(job, form, wants_usage), is_openai=True)
    await job.wait()
    choices = [form.choice(job.pieces, _reason(job), is_chunk=False)]
    answer = form.head | {"object": form.kind, "choices": choices, "usage": _usage(job)}
    return JSONResponse(answer | job.report())


async def _chunks(job: Job, form: Text, wants_usage: bool) -> Events:
    head = form.head | {"object": form.chunk_kind} | ({"usage": None} if wants_usage else {})
    async for pieces in job.batches():
        yield [head | {"choices": [form.choice(pieces, None)]}]
    last = [head | {"choices": [form.choice([], _reason(job))]} | job.report()]
    if wants_usage:
        last.append(head | {"choices": [], "usage": _usage(job)})
    yield last


def _shown(pieces: Sequence[Piece]) -> str:
    return "".join(piece.shown for piece in pieces)


def _reason(job: Job) -> str:
    return LENGTH if job.finish == LENGTH else "stop"


def _usage(job: Job) -> dict[str, Any]:
    n_prompt, n_new = len(job.request.prompt), len(job.pieces)
    usage: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
    return usage | {"prompt_tokens_details": {"cached_tokens": job.request.n_reused}}
