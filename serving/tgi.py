"""The routes of text-generation-inference."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from bench.record import rounded
from serving.answers import Events, Failure, invalid, stream
from serving.jobs import Job, Piece
from serving.prompts import Wanted
from serving.schemas import Decoding, Generate, GenerateOrStream, Tokenize
from serving.service import Service

VERSION = "0.1.0"


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["text-generation-inference"])

    @router.post("/generate")
    async def generate(request: Request, body: Generate) -> Response:
        return await _respond(service, request, body)

    @router.post("/generate_stream")
    async def generate_stream(request: Request, body: Generate) -> Response:
        return await _respond(service, request, body, streams=True)

    @router.post("/")
    async def generate_or_stream(request: Request, body: GenerateOrStream) -> Response:
        return await _respond(service, request, body, streams=bool(body.stream), in_list=True)

    @router.post("/tokenize")
    async def tokenize(request: Request, body: Tokenize) -> Response:
        text, prompts = body.inputs, service.prompts
        wanted = Wanted(Decoding(), lambda: prompts.places(text, body.add_special_tokens), len(text))
        job = await service.encode(request, wanted)
        if job.finish is not None:
            raise job.failure or Failure(499, job.finish, "the client has left")
        found: Any = job.request.prompt
        places = ((id_, prompts.specials.get(id_, text[start:stop]), start, stop) for id_, start, stop in found)
        return JSONResponse([dict(zip(("id", "text", "start", "stop"), place, strict=True)) for place in places])

    @router.get("/info")
    async def info() -> dict[str, Any]:
        session, limits, prompts = service.session, service.limits, service.prompts
        runner, draft = session.runner, session.plan.draft
        drafts = None if draft is None else {"draft": draft.config.name, "gamma": draft.gamma, "auto": draft.automatic}
        info: dict[str, Any] = {"model_id": session.name, "model_sha": session.plan.target.manifest_sha256}
        info |= {"model_dtype": str(session.plan.dtype), "model_device_type": runner.device.type}
        info |= {"max_concurrent_requests": runner.max_batch + limits.max_queue, "max_best_of": 1}
        info |= {"max_stop_sequences": limits.max_stop_sequences, "max_input_tokens": prompts.max_input}
        info |= {"max_total_tokens": prompts.max_total, "max_new_tokens": limits.max_new_tokens}
        info |= {"max_batch_size": runner.max_batch, "validation_workers": 1, "max_client_batch_size": 1}
        info |= {"chat": prompts.template is not None, "verification": service.flags.batch.verification}
        info |= {"plain_requests": not limits.no_plain_requests, "speculation": drafts}
        return info | {"router": "foretoken", "version": VERSION}

    return router


async def _respond(
    service: Service, request: Request, body: Generate, streams: bool = False, in_list: bool = False
) -> Response:
    own, text, prompts = body.own, body.inputs, service.prompts
    if not text:
        raise invalid("inputs", "is empty")
    said = prompts.conversation([{"role": "user", "content": text}], "parameters.chat") if own.chat else None

    def encode() -> list[int]:
        return (said() if said else prompts.tokenizer.encode(text))[-(own.truncate or 0) :]

    of_length, within, logprobs = "parameters.max_new_tokens", "parameters.", streams or bool(own.details)
    wanted = Wanted(
        own, encode, len(text), own.max_new_tokens, "inputs", of_length, within, keeps_stop=True, logprobs=logprobs
    )
    job, prefix = await service.submit(request, wanted), text if own.return_full_text else ""
    if streams:
        return await stream(_events(job, prefix), is_openai=False)
    await job.wait()
    answer: dict[str, Any] = {"generated_text": prefix + job.text}
    if own.details:
        tokens = [_token(piece) for piece in job.pieces]
        answer["details"] = _details(job) | {"prefill": [], "tokens": tokens, "best_of_sequences": None}
    return JSONResponse([answer] if in_list else answer)


async def _events(job: Job, prefix: str) -> Events:
    n_sent = 0
    async for pieces in job.batches():
        lines = []
        for index, piece in enumerate(pieces, n_sent + 1):
            event = {"index": index, "token": _token(piece), "top_tokens": [], "generated_text": None}
            rate = rounded(job.counts.acceptance_rate)
            speculation = {"drafted": piece.drafted, "round": piece.round, "acceptance_rate": rate}
            event |= {"details": None, "speculation": speculation}
            if job.finish is not None and job.failure is None and index == len(job.pieces):
                event |= {"generated_text": prefix + job.text, "details": _details(job)}
            lines.append(event)
        n_sent += len(pieces)
        yield lines


def _token(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "text": piece.shown, "logprob": piece.logprob, "special": piece.special}


def _details(job: Job) -> dict[str, Any]:
    return {
        "finish_reason": job.finish,
        "generated_tokens": len(job.pieces),
        "input_length": len(job.request.prompt),
        **job.report(),
    }
