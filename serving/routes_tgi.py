"""The routes of text-generation-inference."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bench.record import rounded
from serving.answers import Answer, Events, Token, batches, best, report, require, stream
from serving.intake import Prompt
from serving.schemas import Generate
from serving.service import Service


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
