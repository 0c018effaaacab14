"""Chat templates: a conversation as the text and token ids that a model was trained on."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import CheckpointError, ConfigError, refuse, refuse_checkpoint
from models.checkpoints.hf_config import read_config
from models.checkpoints.loading import CONVERT
from models.checkpoints.manifest import CHAT_TEMPLATE, CONFIG, TOKENIZER_CONFIG
from models.checkpoints.reasoning import CLOSE
from models.checkpoints.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
# Noncharacters of Unicode, which no text has: they mark control tokens in a message, apart from the template's.
BEGIN, END = "\ufdd0", "\ufdd1"
UNMARKED = partial(re.sub, f"[{BEGIN}{END}]", "")
# Tags between which transformers collects the model's turn; they print nothing.
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template. path: its file. tokens: `bos_token`, `eos_token` and others by the names templates use."""

    path: Path
    template: jinja2.Template
    tokens: Mapping[str, str]
    tokenizer: Tokenizer

    @property
    def is_hermes(self) -> bool:
        """True if it shows calls of tools as Hermes and Qwen write them."""
        return "<tool_call>" in self.path.read_text(encoding="utf-8")

    @property
    def has_reasoning(self) -> bool:
        """True if it knows of reasoning between tags."""
        return CLOSE in self.path.read_text(encoding="utf-8")

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES, tools: Tools = None
    ) -> str:
        """Return the text of `messages`, each with `role` and `content`, and the opening of the model's turn. Equals
        transformers' `apply_chat_template` with `tools` and `variables`, such as `enable_thinking`, for the template.

        Raises ConfigError with what the template raised, for tools that leave no trace in the text, and for variables
        that are not for clients.
        """
        if taken := {"messages", "tools", "documents", "add_generation_prompt", *self.tokens} & variables.keys():
            what = "a variable of the chat template is taken"
            raise ConfigError(what, "chat_template_kwargs", ", ".join(sorted(taken)), "other names", "leave it out")
        given = {**variables, "tools": tools, "documents": None, "add_generation_prompt": True, **self.tokens}
        try:
            text = self.template.render({**given, "messages": messages})
        except Exception as error:  # a template is a program
            seen = f"{', '.join(str(message.get('role')) for message in messages) or 'no messages'}: {error}"
            what, fix = "the chat template refuses a conversation", "send the roles that it wants, in its order"
            refuse(self.path, seen, "messages that this model's template takes", what, fix)
        if tools and text == self.render(messages, variables):
            fix = "leave them out, or use a model whose template can"
            names = ", ".join(str(tool.get("function", tool).get("name")) for tool in tools)[:200]
            raise ConfigError(f"this model's chat template cannot show tools ({fix})", "tools", names, "no tools", fix)
        return text

    def encode(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES, tools: Tools = None
    ) -> list[int]:
        """Return the token ids of `messages`, with the template's BOS alone. Control tokens in a message, variable or
        tool are plain text. Raises ConfigError like `render`."""
        controls = sorted(self.tokenizer.control_tokens(), key=len, reverse=True)
        control = "|".join(map(re.escape, controls)) or "(?!)"

        def marked(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {marked(name): marked(each) for name, each in value.items()}
            if isinstance(value, list):
                return [marked(each) for each in value]
            return re.sub(control, rf"{BEGIN}\g<0>{END}", UNMARKED(value)) if isinstance(value, str) else value

        rendered = self.render([marked(message) for message in messages], marked(variables), marked(tools))
        if found := re.search(rf"\\ufdd0({control})\\ufdd1", rendered):  # a list that is printed as Python writes it
            what = "the chat template prints a list with a control token"
            where = "messages, tools, chat_template_kwargs"
            refuse(where, found[1], "text without control tokens", what, "leave it out")
        texts = map(UNMARKED, re.split(f"{BEGIN}({control}){END}", rendered))
        return [id_ for odd, text in enumerate(texts) for id_ in self.tokenizer.encode_chat(text, control=odd % 2 == 0)]

    def end_of_turn(self) -> list[int]:
        """Return the control token that the template writes after an answer; an empty list if it writes none."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": BEGIN}]
        with suppress(Exception):  # a template is a program
            text = self.template.render({**self.tokens, "messages": messages, "add_generation_prompt": False})
            ids = self.tokenizer.encode_chat(text.partition(BEGIN)[2].strip(), control=True)
            return [id_ for id_ in ids[:1] if id_ in self.tokenizer.control_tokens().values()]
        return []


class NoChatTemplateError(CheckpointError):
    """The checkpoint has no chat template: it was not trained for conversations."""


def load_chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """Load a checkpoint's `chat_template.jinja`, or else `chat_template` of its tokenizer_config.json. Raises
    NoChatTemplateError, or CheckpointError for a template that does not compile."""
    own, where = folder / CHAT_TEMPLATE, folder / TOKENIZER_CONFIG
    try:
        settings = json.loads(where.read_text(encoding="utf-8")) if where.is_file() else {}
        named = settings.get("chat_template")
        if isinstance(named, list):
            named = {one["name"]: one["template"] for one in named}.get("default")
        special = [(name, value) for name, value in settings.items() if name.endswith("_token")]
        tokens = {name: str(value["content"]) for name, value in special if isinstance(value, dict)}
        tokens |= {name: value for name, value in special if isinstance(value, str)}
        if own.is_file():
            where, named = own, own.read_text(encoding="utf-8")
        template = None if named is None else _compiled(named)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, jinja2.TemplateError) as error:
        seen = f"line {error.lineno}: {error}" if isinstance(error, jinja2.TemplateSyntaxError) else error
        refuse_checkpoint(where, seen, "a Jinja template, as transformers renders it")
    if template is None:
        seen, what = f"no such file, and no chat_template in {TOKENIZER_CONFIG}", "the checkpoint has no chat template"
        fix = f"copy the original model's {CHAT_TEMPLATE} there, or convert a GGUF that has one again ({CONVERT})"
        refuse(own, seen, "the model's own template", what, fix, NoChatTemplateError)
    return ChatTemplate(where, template, _special_ids(folder, tokenizer, tokens) | tokens, tokenizer)


def _special_ids(folder: Path, tokenizer: Tokenizer, known: Mapping[str, str]) -> dict[str, str]:
    """Return BOS and EOS by their ids in config.json, where tokenizer_config.json lacks them."""
    if not (missing := {"bos_token", "eos_token"} - known.keys()):
        return {}
    config, pieces = read_config(folder / CONFIG), dict[object, str | None](enumerate(tokenizer.pieces()))
    ids = {name: config.get(f"{name}_id") for name in missing}
    firsts = {name: (one or [None])[0] if isinstance(one, list) else one for name, one in ids.items()}
    return {name: piece for name, id_ in firsts.items() if (piece := pieces.get(id_))}


def _compiled(text: str) -> jinja2.Template:
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    made.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's filter escapes characters of HTML
    made.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
    return made.from_string(GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", text))


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
