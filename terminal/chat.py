"""foretoken.py chat: a conversation whose answers are written as they grow."""

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

from bench.config import AUTO, RunConfig, Sizes
from bench.plan import Plan, resolve
from bench.session import Session
from common.errors import refuse, require_at_least
from common.say import say
from engine.decoding import Decoder
from engine.drafters import Drafter
from engine.requests import Request
from engine.runner import not_finite
from models.checkpoints.text_stream import TextStream
from terminal.models import ModelFlags, require_fixed_text
from terminal.panes import printable

RESET, EXIT = "/reset", "/exit"
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Chat(ModelFlags):
    """a conversation with the model, and after each answer what speculation did"""

    FLAGS: ClassVar[dict[str, str]] = ModelFlags.FLAGS | {"max_length": "--context"}

    system: str | None = None  # what the conversation begins with, before the first message
    gen_len: int = 512  # the most new tokens of an answer
    no_thinking: bool = False  # ask a model that thinks before it answers, such as Qwen3, not to
    context: int = 4096  # the most tokens of a conversation, if the model's context has as many

    def run(self) -> None:
        """Answer what is typed, or each line that is piped in. Errors: UserError."""
        require_at_least("gen_len", self.gen_len, 1)
        config = self.config()
        template = config.target.with_text().chat_template()
        session = Session.of_plan(plan := plan_of(config, self.context))
        capacity = plan.target.capacity
        longest = "--context" if capacity < plan.target.source.config.max_context else "the model's context"
        drafter = session.drafter()
        begin: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages, ids = begin, count()  # every request has a new id, since drafts may keep what a request drew
        for line in _lines():
            if line == EXIT:
                return
            if line == RESET:
                messages = begin
            elif line.startswith("/"):
                say(f"  there is no command {line.split()[0][:40]}: {RESET} begins anew, {EXIT} ends")
            elif line:
                question = [*messages, {"role": "user", "content": line}]
                prompt = template.encode(question, {"enable_thinking": False} if self.no_thinking else {})
                room = capacity - len(prompt) - plan.gamma - 1
                if room < 1:
                    say(f"  no room for that in the {capacity} tokens of {longest}: {RESET} begins anew")
                    continue
                ends, params = plan.target.source.end_tokens, plan.sampling
                request = Request(prompt, min(self.gen_len, room), ends, params, id=next(ids))
                answer = _answer(session, drafter, request, "--gen_len" if self.gen_len <= room else longest)
                messages = [*question, {"role": "assistant", "content": answer}]


def plan_of(config: RunConfig, context: int) -> Plan:
    """Return the plan of a conversation of up to `context` tokens. Errors: UserError, also for a draft with `auto`."""
    require_fixed_text(config)
    plan = resolve(replace(config, sizes=Sizes(B=1)), max_length=context)
    for name in plan.automatic:
        required = "a policy" if name == "draft_policy" else "a number"
        refuse(name, AUTO, required, "costs are measured on prompts, which are not known beforehand")
    return plan


def _answer(session: Session, drafter: Drafter, request: Request, cut_by: str) -> str:
    """Write and return the answer as it grows, until Ctrl-C; then write what speculation did.

    cut_by: what limits its length. Errors: UserError for logits that are not finite.
    """
    assert session.tokenizer is not None
    stream, text, seconds = TextStream(session.tokenizer), "", 0.0

    def write(piece: str) -> str:
        print(printable(piece), end="", flush=True)
        return piece

    # A new decoder for each answer, since a decoder that was interrupted in a round cannot go on.
    decoder = Decoder(session.runner, drafter=drafter, verification=session.plan.verification, reuses="prefixes")
    decoder.submit(request)
    with suppress(KeyboardInterrupt):
        while True:
            n_written, stats = len(request.tokens), decoder.step()
            for token in request.tokens[n_written:]:
                text += "" if token in request.stop_tokens else write(stream.add(token))
            if stats is None:
                break
            seconds += stats.seconds
    text += write(stream.rest())
    print(flush=True)
    if request.error:
        raise not_finite("the answer", request.error)
    say(f"  {_figures(request, seconds, cut_by)}")
    return text


def _figures(request: Request, seconds: float, cut_by: str) -> str:
    counts = request.counts
    cut = f", cut at {request.limit} tokens by {cut_by}"
    why = {None: ", cancelled", "length": cut}.get(request.finish_reason, "")
    if not counts.emitted:
        return f"no round was needed{why}"
    rate = "nothing was drafted" if counts.acceptance_rate is None else f"acceptance rate {counts.acceptance_rate:.3f}"
    ms, per_round = 1e3 * seconds / counts.emitted, counts.emitted / counts.rounds
    return f"{rate}, {per_round:.2f} tokens per round, {ms:.1f} ms per token{why}"


def _lines() -> Iterator[str]:
    """Yield the lines of stdin, typed until Ctrl-D or piped in."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    prompt = "> " if sys.stdin.isatty() else ""
    with suppress(ImportError):
        import readline  # noqa: F401  # makes typed lines editable
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
