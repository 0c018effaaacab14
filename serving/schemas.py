"""The bodies of requests. Null means that a field is not given.

A list is checked up to its first wrong value, since checks run on the event loop.
"""

import json
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, MOST_BANS, SamplingParams

# Drawn seeds are exact in every language; JavaScript's whole numbers end at 2**53.
DRAWN_SEEDS = 2**32
LONGEST_STOP = 256
FILTERS = "top_k", "top_p", "min_p", "typical_p"
EDITS = "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"
LENGTHS = AliasChoices("max_completion_tokens", "max_tokens")
# Fields that some clients always send and this server lacks, with their values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("top_n_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("watermark", "decoder_input_details", "include_obfuscation", "echo", "store"), (False,)),
    "metadata": ({},),
    **dict.fromkeys(("tools", "functions", "tool_calls", "annotations"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "suffix": ("",),
    "parallel_tool_calls": (False, True),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto",),
}

# A constraint makes pydantic refuse text that no tokenizer reads: half a character, which JSON can escape.
Text = Annotated[str, Field(min_length=0)]
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]], Field(fail_fast=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Penalty = Annotated[float, Field(ge=-2, le=2, strict=True)]
Word = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def _single(prompt: Any) -> Any:
    """Return the prompt of a list that holds nothing else. Errors: ValueError for a list of several prompts."""
    if not (isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt)):
        return prompt
    if len(prompt) > 1:
        raise ValueError("has several prompts; this server takes a single prompt")
    return prompt[0]


def _grammar(given: Any) -> tuple[str, str]:
    """Return the arguments of `Grammars.start` for OpenAI's form or text-generation-inference's. Errors: ValueError."""
    match given:
        case {"type": "json_object", **rest} if not rest:
            given = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(given)}, **rest} if not rest:
            pass
        case {"type": "json" | "json_object", "value": dict(given), **rest} if not rest:
            pass
        case {"type": "regex", "value": str(text), **rest} if not rest:
            return "regex", text.encode().decode()  # half a character is a ValueError
        case _:
            raise ValueError("has to be json_object, json_schema with its schema, or json or regex with its value")
    return "json_schema", json.dumps(given)


Constraint = Annotated[Any, BeforeValidator(_grammar)]


class Body(BaseModel):
    """A JSON object. Fields that this server lacks are refused, unless their value has no effect."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None and value not in NEUTRAL.get(name, ())}


class GenerationSpec(Body):
    """How to continue a prompt. PROMPT, LENGTH, GRAMMAR: names of fields in errors. WITHIN: prefix of all other fields.
    DEFAULT_LENGTH: the most new tokens if no length is given. KEEPS_STOP: the text ends with the stop string."""

    PROMPT: ClassVar[str]
    LENGTH: ClassVar[str]
    GRAMMAR: ClassVar[str] = "response_format"
    WITHIN: ClassVar[str] = ""
    DEFAULT_LENGTH: ClassVar[int] = 2**31
    KEEPS_STOP: ClassVar[bool] = False

    max_tokens: Count | None = None  # the most new tokens
    truncate: Count | None = None  # keep the last tokens of the prompt
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, strict=True)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    typical_p: Share = 1.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, strict=True)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100, strict=True)]] = {}
    bad_words: Annotated[list[Word], Field(max_length=MOST_BANS // 2, fail_fast=True)] = []  # each in two forms
    min_tokens: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    ignore_eos: Switch = False
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = Field(
        default_factory=lambda: secrets.randbelow(DRAWN_SEEDS)
    )
    stop: Annotated[
        list[Word],
        Field(max_length=LONGEST_STOP, fail_fast=True),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    speculate: Switch = True
    grammar: Constraint = None  # `{"type": "json", "value": SCHEMA}`, or `"regex"` with a regular expression

    @property
    def samples(self) -> bool:
        return self.temperature >= MIN_TEMPERATURE

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return {}

    def sampling(self) -> SamplingParams:
        """Return the distribution of the next token, without `bad_words`; greedy decoding has no filters."""
        filters = (*FILTERS, "temperature") if self.samples else ()
        values = {name: getattr(self, name) for name in (*EDITS, *filters)}
        return SamplingParams(seed=self.seed, **values)


class Parameters(GenerationSpec):
    """Parameters of text-generation-inference. Without `do_sample`, a temperature other than 1 or a filter means
    sampling. chat: put the inputs into the model's chat template."""

    PROMPT, LENGTH, WITHIN, KEEPS_STOP = "inputs", "parameters.max_new_tokens", "parameters.", True
    GRAMMAR = "parameters.grammar"

    max_tokens: Annotated[Count | None, Field(validation_alias="max_new_tokens")] = None
    do_sample: Switch | None = None
    details: Switch = False
    return_full_text: Switch = False
    chat: Switch = False

    @property
    def samples(self) -> bool:
        is_filtered = self.temperature != 1 or SamplingParams(**{name: getattr(self, name) for name in FILTERS}).filters
        return super().samples and (is_filtered if self.do_sample is None else self.do_sample)


class Generate(Body):
    """The body of text-generation-inference's routes."""

    inputs: Text
    parameters: Parameters = Field(default_factory=Parameters)
    stream: Switch = False


class StreamOptions(Body):
    include_usage: Switch = False


class OpenAISpec(GenerationSpec):
    """Fields of both routes of OpenAI. `model` and `user` have no effect: a server has one model."""

    model: Text = ""
    user: Text = ""
    stream: Switch = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    grammar: Annotated[Constraint, Field(validation_alias="response_format")] = None  # JSON: any object, or of a schema


class Completion(OpenAISpec):
    """The body of /v1/completions. logprobs: 0 means log-probabilities of the chosen tokens."""

    PROMPT, LENGTH, DEFAULT_LENGTH = "prompt", "max_tokens", 16

    prompt: Annotated[Text | TokenIds, BeforeValidator(_single)]
    logprobs: Annotated[int, Field(ge=0, le=0, strict=True)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        list[TextPart],
        Field(fail_fast=True),
        BeforeValidator(lambda text: [{"type": "text", "text": text}] if isinstance(text, str) else text),
    ] = []

    @model_validator(mode="after")
    def _require_content(self) -> "Message":
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("a message of the system or a user needs content")
        return self

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatCompletion(OpenAISpec):
    """The body of /v1/chat/completions. chat_template_kwargs: such as `{"enable_thinking": false}` for Qwen3."""

    PROMPT, LENGTH = "messages", "max_completion_tokens"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[Count | None, Field(validation_alias=LENGTHS)] = None
    logprobs: Switch = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs
