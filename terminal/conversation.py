"""A conversation: each answer is decoded behind all that was said before it, and written as it grows."""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count

from bench.config import AUTO, RunConfig, Sizes
from bench.plan import Plan, with_draft
from bench.session import Session
from common.errors import ConfigError, flag, require_at_least
from common.say import say
from engine.decoding import Decoder
from engine.drafters import Drafter
from engine.requests import Request
from engine.runner import not_finite
from models.checkpoints.text_stream import TextStream
from terminal.in_turn import plan_of
from terminal.track import printable

RESET, EXIT = "/reset", "/exit"
Message = dict[str, str]


def converse(config: RunConfig, system: str | None, gen_len: int, context: int) -> None:
    """Answer what is typed, or each line of what is piped, by at most `gen_len` tokens. Errors: UserError."""
    require_at_least("gen_len", gen_len, 1)
    template = config.target.with_text().chat_template()
    session = Session.of_plan(_plan(config, context))
    drafter = session.drafter()
    begin: list[Message] = [{"role": "system", "content": system}] if system else []
    said, numbers = begin, count()  # drafts may keep what a request drew: none comes twice
    for line in _lines():
        if line == EXIT:
            return
        if line == RESET:
            said = begin
        elif line.startswith("/"):
            say(f"  there is no command {line.split()[0][:40]}: {RESET} begins anew, {EXIT} ends")
        elif line:
            asked = [*said, {"role": "user", "content": line}]
            prompt = template.encode(asked)
            room = session.capacity - len(prompt) - session.gamma - 1
            if room < 1:
                say(f"  no room for that in {session.capacity} tokens: {RESET} begins anew, --context has more")
                continue
            ends, params = session.target.config.eos_tokens, session.sampling.params
            request = Request(prompt, min(gen_len, room), ends, params, id=next(numbers))
            answer = _answer(session, drafter, request)
            said = [*asked, {"role": "assistant", "content": answer}]


def _plan(config: RunConfig, context: int) -> Plan:
    """With room for a conversation of so many tokens, none of which is known yet. Errors: UserError."""
    plan = plan_of(replace(config, sizes=Sizes(B=1, gen_len=1)), [[0]])
    assert plan.draft is not None
    if plan.draft.automatic:
        what = "costs are measured on prompts, and nothing is known of an answer beforehand"
        named = "gamma" if plan.draft.auto_gamma else "draft_policy" if plan.draft.auto_policy else "draft_budget"
        required = "a policy" if named == "draft_policy" else "a number"
        raise ConfigError(what, flag(named), AUTO, required, f"use {flag(named)} with {required}")
    room = min(context, plan.target.config.max_context)
    require_at_least("context", room, plan.gamma + 3)
    plan = with_draft(replace(plan, prefix_len=room - plan.gamma - 2), plan.config.draft)
    return replace(plan, capacity=plan.length)


def _answer(session: Session, drafter: Drafter, request: Request) -> str:
    """Write the answer as it grows, until Ctrl-C, then what speculation did; returns it. Errors: UserError for logits
    that are not finite."""
    assert session.tokenizer is not None
    stream, text, seconds = TextStream(session.tokenizer), "", 0.0

    def write(piece: str) -> str:
        print(printable(piece), end="", flush=True)
        return piece

    # A decoder of its own: one that was interrupted in a round is of no use any more.
    decoder = Decoder(session.runner, drafter=drafter, verification=session.sampling.mode, reuses="prefixes")
    decoder.submit(request)
    with suppress(KeyboardInterrupt):
        while True:
            n_shown, stats = len(request.tokens), decoder.step()
            for token in request.tokens[n_shown:]:
                text += write(stream.add(token))
            if stats is None:
                break
            seconds += stats.seconds
    text += write(stream.rest())
    print(flush=True)
    if request.error:
        raise not_finite("the answer", request.error)
    say(f"  {_figures(request, seconds)}")
    return text


def _figures(request: Request, seconds: float) -> str:
    counts = request.counts
    why = {None: ", cancelled", "length": f", cut at {request.limit} tokens"}.get(request.finish_reason, "")
    if not counts.emitted:
        return f"no round was needed{why}"
    rate = "nothing was drafted" if counts.acceptance_rate is None else f"acceptance rate {counts.acceptance_rate:.3f}"
    ms, per_round = 1e3 * seconds / counts.emitted, counts.emitted / counts.rounds
    return f"{rate}, {per_round:.2f} tokens per round, {ms:.1f} ms per token{why}"


def _lines() -> Iterator[str]:
    """Those that are typed, until Ctrl-D, or piped."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    prompt = "> " if sys.stdin.isatty() else ""
    with suppress(ImportError):
        import readline  # noqa: F401  # what is typed can be edited
    while True:
        try:
            yield input(prompt).strip()
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            say(f"\n  {EXIT} or Ctrl-D ends")
