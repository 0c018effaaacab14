"""The routes of text-generation-inference."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from models.checkpoints.text_stream import TextStream
from serving.events import Events, stream
from serving.failures import invalid
from serving.jobs import Job, Piece, rounded
from serving.schemas import Generate, GenerateOrStream, Tokenize
from serving.service import Service

NAMES = "inputs", "parameters.max_new_tokens", "parameters.stop"
VERSION = "0.1.0"


def routes(service: Service) -> APIRouter:
    router = APIRouter(tags=["text-generation-inference"])

    @router.post("/generate")
    async def generate(request: Request, body: Generate) -> Response:
        return JSONResponse(await _answer(service, request, body))

    @router.post("/generate_stream")
    async def generate_stream(request: Request, body: Generate) -> Response:
        return await _stream(service, request, body)

    @router.post("/")
    async def generate_or_stream(request: Request, body: GenerateOrStream) -> Response:
        if body.stream:
            return await _stream(service, request, body)
        return JSONResponse([await _answer(service, request, body)])

    @router.post("/tokenize")
    async def tokenize(body: Tokenize) -> Response:
        tokenizer = service.tokenizer
        ids = await service.encode(lambda: tokenizer.encode(body.inputs, body.add_special_tokens), "inputs")
        texts, found, end = TextStream(tokenizer), list[dict[str, Any]](), 0
        for token in ids:
            start, text = end, texts.add(token)
            end += len(text)
            found.append({"id": token, "text": service.specials.get(token, text), "start": start, "stop": end})
        return JSONResponse(found)

    @router.get("/info")
    async def info() -> dict[str, Any]:
        session, limits = service.session, service.limits
        draft = session.draft
        drafts = None if draft is None else {"draft": draft.kind, "gamma": draft.gamma, "auto": draft.automatic}
        return {
            "model_id": session.name,
            "model_sha": session.target.manifest_sha256,
            "model_dtype": str(session.plan.dtype),
            "model_device_type": session.runner.device.type,
            "max_concurrent_requests": session.runner.max_batch + limits.max_queue,
            "max_best_of": 1,
            "max_stop_sequences": limits.max_stop_sequences,
            "max_input_tokens": service.max_input,
            "max_total_tokens": service.max_total,
            "max_new_tokens": limits.max_new_tokens,
            "max_batch_size": session.runner.max_batch,
            "validation_workers": 1,
            "max_client_batch_size": 1,
            "chat": service.has_template,
            "verification": service.flags.batch.verification,
            "router": "foretoken",
            "version": VERSION,
            "speculation": drafts,
        }

    return router


async def _submit(service: Service, request: Request, body: Generate, logprobs: bool) -> Job:
    own = body.own
    if own.chat:
        prompt = await service.conversation([{"role": "user", "content": body.inputs}], "chat")
    else:
        prompt = await service.encode(lambda: service.tokenizer.encode(body.inputs), "inputs")
    if own.truncate is not None:
        prompt = prompt[-own.truncate :]
    if not body.inputs:
        raise invalid("inputs", "is empty")
    how: dict[str, Any] = {"names": NAMES, "keeps_stop": True, "logprobs": logprobs, "speculate": own.speculate}
    return service.submit(request, prompt, own.sampling, own.max_new_tokens, own.stop or [], **how)


async def _answer(service: Service, request: Request, body: Generate) -> dict[str, Any]:
    own = body.own
    job = await _submit(service, request, body, logprobs=bool(own.details))
    await job.wait()
    answer: dict[str, Any] = {"generated_text": (body.inputs if own.return_full_text else "") + job.text}
    if own.details:
        tokens = [_token(piece) for piece in job.pieces]
        answer["details"] = _details(job) | {"prefill": [], "tokens": tokens, "best_of_sequences": None}
    return answer


async def _stream(service: Service, request: Request, body: Generate) -> Response:
    own = body.own
    job = await _submit(service, request, body, logprobs=True)
    prefix = body.inputs if own.return_full_text else ""

    async def events() -> Events:
        n_sent = 0
        async for pieces in job.batches():
            lines = []
            for index, piece in enumerate(pieces, n_sent + 1):
                event = {"index": index, "token": _token(piece), "top_tokens": [], "generated_text": None}
                rate = rounded(job.counts.acceptance_rate)
                speculation = {"drafted": piece.drafted, "round": piece.round, "acceptance_rate": rate}
                event |= {"details": None, "speculation": speculation}
                if job.finish is not None and index == len(job.pieces):
                    event |= {"generated_text": prefix + job.text, "details": _details(job)}
                lines.append(event)
            n_sent += len(pieces)
            yield lines

    return await stream(service, job, events(), is_openai=False)


def _token(piece: Piece) -> dict[str, Any]:
    return {"id": piece.id, "text": piece.shown, "logprob": piece.logprob, "special": piece.special}


def _details(job: Job) -> dict[str, Any]:
    return {
        "finish_reason": job.finish,
        "generated_tokens": len(job.pieces),
        "input_length": len(job.request.prompt),
        "seed": job.request.sampling.seed,
        **job.report(),
    }
