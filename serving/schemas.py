"""The bodies of requests. Null means that a field is not given.

A list is checked up to its first wrong value, since checks run on the event loop.
"""

import json
import secrets
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from engine.grammars import GrammarSpec
from engine.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingParams

# Drawn seeds are exact in every language; JavaScript's whole numbers end at 2**53.
DRAWN_SEEDS = 2**32
LONGEST_STOP = 256
LENGTHS = AliasChoices("max_completion_tokens", "max_tokens")
# Fields that some clients always send and this server lacks, with their values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of", "repetition_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "top_n_tokens", "top_logprobs"), (0,)),
    **dict.fromkeys(("watermark", "decoder_input_details", "include_obfuscation", "echo", "store"), (False,)),
    **dict.fromkeys(("logit_bias", "metadata"), ({},)),
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


def _single(prompt: Any) -> Any:
    """Return the prompt of a list that holds nothing else. Errors: ValueError for a list of several prompts."""
    if not (isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt)):
        return prompt
    if len(prompt) > 1:
        raise ValueError("has several prompts; this server takes a single prompt")
    return prompt[0]


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
    """How to continue a prompt. PROMPT, LENGTH, GRAMMAR: names of the fields in errors. WITHIN: prefix of all other
    fields. DEFAULT_LENGTH: the most new tokens if no length is given. KEEPS_STOP: the text ends with the stop
    string."""

    PROMPT: ClassVar[str]
    LENGTH: ClassVar[str]
    GRAMMAR: ClassVar[str]
    WITHIN: ClassVar[str] = ""
    DEFAULT_LENGTH: ClassVar[int] = 2**31
    KEEPS_STOP: ClassVar[bool] = False

    max_tokens: Count | None = None  # the most new tokens
    truncate: Count | None = None  # keep the last tokens of the prompt
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, strict=True)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = 0
    seed: Annotated[int, Field(ge=0, lt=2**63, strict=True)] = Field(
        default_factory=lambda: secrets.randbelow(DRAWN_SEEDS)
    )
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
        Field(max_length=LONGEST_STOP, fail_fast=True),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = []
    speculate: Switch = True

    @property
    def samples(self) -> bool:
        return self.temperature >= MIN_TEMPERATURE

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        return {}

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        """The grammar that the answer has to follow, or None."""
        return None

    def sampling(self) -> SamplingParams:
        """Return the distribution of the next token; greedy decoding has no filters."""
        if not self.samples:
            return SamplingParams(seed=self.seed)
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.seed)


class TgiGrammar(Body):
    """A grammar of text-generation-inference."""

    type: Literal["json", "regex"]
    value: dict[str, Any] | Text

    @model_validator(mode="after")
    def _require_kind(self) -> "TgiGrammar":
        if isinstance(self.value, str) != (self.type == "regex"):
            raise ValueError("the value is an object for json, a text for regex")
        return self

    @property
    def spec(self) -> GrammarSpec:
        return GrammarSpec("regex", self.value) if isinstance(self.value, str) else _json_of(self.value)


def _json_of(schema: dict[str, Any]) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


class Parameters(GenerationSpec):
    """Parameters of text-generation-inference. Without `do_sample`, a temperature other than 1, `top_k` or `top_p`
    means sampling. chat: put the inputs into the model's chat template."""

    PROMPT, LENGTH, WITHIN, KEEPS_STOP = "inputs", "parameters.max_new_tokens", "parameters.", True
    GRAMMAR = "parameters.grammar"

    max_tokens: Annotated[Count | None, Field(validation_alias="max_new_tokens")] = None
    do_sample: Switch | None = None
    details: Switch = False
    return_full_text: Switch = False
    chat: Switch = False
    grammar: TgiGrammar | None = None

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        return self.grammar and self.grammar.spec

    @property
    def samples(self) -> bool:
        is_filtered = self.temperature != 1 or self.top_k > 0 or self.top_p < 1
        return super().samples and (is_filtered if self.do_sample is None else self.do_sample)


class Generate(Body):
    """The body of text-generation-inference's routes."""

    inputs: Text
    parameters: Parameters = Field(default_factory=Parameters)
    stream: Switch = False


class StreamOptions(Body):
    include_usage: Switch = False


class JsonSchema(Body):
    """A schema of OpenAI's `response_format`. The answer always follows it, `strict` or not."""

    name: Text = ""
    description: Text = ""
    strict: Switch = True
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Body):
    """The answer is JSON: an object, or what a schema describes."""

    type: Literal["json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _require_schema(self) -> "ResponseFormat":
        if (self.json_schema is None) != (self.type == "json_object"):
            raise ValueError("json_schema is given with the type json_schema, and only then")
        return self

    @property
    def spec(self) -> GrammarSpec:
        return _json_of({"type": "object"} if self.json_schema is None else self.json_schema.schema_)


class OpenAISpec(GenerationSpec):
    """Fields of both routes of OpenAI. `model` and `user` have no effect: a server has one model."""

    GRAMMAR = "response_format"

    model: Text = ""
    user: Text = ""
    stream: Switch = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    response_format: ResponseFormat | None = None

    @property
    def grammar_spec(self) -> GrammarSpec | None:
        return self.response_format and self.response_format.spec


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
