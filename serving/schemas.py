"""The bodies of requests. Null means that a field is not given.

A list is checked up to its first wrong value, since checks run on the event loop.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json, to_json

from common.errors import flag, refuse
from engine.sampling.distribution import MAX_TEMPERATURE, MIN_TEMPERATURE, MOST_BANS, SamplingParams
from models.checkpoints.model_source import ModelSource
from serving.answers import require

# Drawn seeds are exact in every language; JavaScript's whole numbers end at 2**53.
DRAWN_SEEDS = 2**32
LONGEST_STOP, MOST_BIASES = 256, 1024
FILTERS = "top_k", "top_p", "min_p", "typical_p"
EDITS = "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"
# Keys of generation_config.json that give fields of requests their defaults, as in vLLM, and the fields.
RECOMMENDED = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
RECOMMENDED["max_new_tokens"] = "max_tokens"
# Fields of messages that chat templates read as they are.
AS_GIVEN = {"name", "tool_calls", "tool_call_id", "reasoning_content"}
# Fields that some clients always send, on routes that lack them, with their values that have no effect.
_WITHOUT_EFFECT: list[tuple[tuple[Any, ...], str]] = [
    ((0,), "top_n_tokens top_logprobs priority mirostat xtc_probability dry_multiplier"),
    ((1,), "n best_of length_penalty repeat_penalty"),
    ((False,), "watermark decoder_input_details include_obfuscation echo store use_beam_search strict"),
    ((False,), "include_stop_str_in_output return_token_ids continue_final_message continuous_usage_stats"),
    ((True,), "skip_special_tokens spaces_between_special_tokens add_generation_prompt"),
    ((True,), "include_reasoning separate_reasoning stream_reasoning"),
    (([],), "tools functions tool_calls annotations stop_token_ids documents logits_processors"),
    (({},), "metadata"),
    (("",), "suffix"),
    (("medium",), "verbosity reasoning_effort"),
    (("none", "auto"), "function_call"),
    (("auto", "default"), "service_tier"),
    (("in-memory", "in_memory"), "prompt_cache_retention"),
    (({"type": "text"},), "response_format"),
    ((["text"],), "modalities"),
]
NEUTRAL = {name: values for values, names in _WITHOUT_EFFECT for name in names.split()}

# A constraint makes pydantic refuse text that no tokenizer reads: half a character, which JSON can escape.
Text = Annotated[str, Field(min_length=0)]
Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
# JSON that text can be written of: neither half a character nor more than 200 levels.
Object = Annotated[dict[str, Any], AfterValidator(lambda value: from_json(to_json(value)))]
Arguments = Annotated[Object, BeforeValidator(lambda text: from_json(text or "{}") if isinstance(text, str) else text)]
Likeliest = Annotated[int, Field(ge=0, le=20, strict=True)]
Natural = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenIds = Annotated[list[Natural], Field(fail_fast=True)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Penalty = Annotated[float, Field(ge=-2, le=2, strict=True)]
Id = Annotated[int, Field(ge=0)]
Bias = Annotated[float, Field(ge=-100, le=100, strict=True)]
Word = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Listed = BeforeValidator(lambda text: [text] if isinstance(text, str) else text)
Stop = Annotated[list[Word], Field(max_length=LONGEST_STOP, fail_fast=True), Listed]


def _grammar(given: Any) -> tuple[str, str]:
    """Return the arguments of `Grammars.start` for OpenAI's form or text-generation-inference's. Errors: ValueError."""
    match given:
        case {"type": "json_object", **rest} if not rest:
            given = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(given), **more}, **rest} if not rest:
            if unknown := {*map(str, more)} - {"name", "description", "strict"}:
                raise ValueError(f"json_schema has no {min(unknown)}")
        case {"type": "json" | "json_object", "value": dict(given), **rest} if not rest:
            pass
        case {"type": "regex", "value": str(text), **rest} if not rest:
            return "regex", text.encode().decode()  # half a character is a ValueError
        case _:
            raise ValueError("has to be json_object, json_schema with its schema, or json or regex with its value")
    return "json_schema", to_json(given).decode()


Constraint = Annotated[Any, BeforeValidator(_grammar)]
ResponseFormat = Annotated[Constraint, Field(validation_alias="response_format")]


class Body(BaseModel):
    """A JSON object. Fields that this server lacks are refused, unless their value has no effect."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        return {k: v for k, v in given.items() if k in cls.model_fields or v not in NEUTRAL.get(k, ())}


class Function(Body):
    """A function that answers may call."""

    name: Name
    description: Text = ""
    parameters: Object = {}


class Calls(NamedTuple):
    """The tools of a conversation. variables: for the chat template. offered: the tools that it reads. required: the
    functions of which the answer has to call one. most: the most calls of an answer; None for any number."""

    variables: Mapping[str, Any] = {}
    offered: Sequence[Mapping[str, Any]] = ()
    required: Sequence[Function] = ()
    most: int | None = None


class GenerationSpec(Body):
    """How to continue a prompt. PROMPT, LENGTH, GRAMMAR: names of fields in errors. WITHIN: prefix of all other fields.
    DEFAULT_LENGTH: the most new tokens if no length is given. KEEPS_STOP: the text ends with the stop string."""

    PROMPT: ClassVar[str]
    LENGTH: ClassVar[str]
    GRAMMAR: ClassVar[str] = "response_format"
    WITHIN: ClassVar[str] = ""
    DEFAULT_LENGTH: ClassVar[int] = 2**31
    KEEPS_STOP: ClassVar[bool] = False

    max_tokens: Count | None = None  # the most new tokens; default: 16
    truncate: Count | None = None  # keep the last tokens of the prompt
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, strict=True)] = 1.0  # 0: greedy
    top_p: Share = 1.0  # probability of the tokens to sample among
    top_k: Annotated[int, Field(ge=-1, lt=2**31, strict=True)] = 0  # tokens to sample among; 0 or -1: all
    min_p: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0  # least probability, as a share of the likeliest's
    typical_p: Share = 1.0  # probability of the most typical tokens, to sample among
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100, strict=True)] = 1.0  # of tokens of prompt and answer
    presence_penalty: Penalty = 0.0  # of tokens of the answer
    frequency_penalty: Penalty = 0.0  # of each occurrence in the answer
    logit_bias: Annotated[dict[Id, Bias], Field(max_length=MOST_BIASES)] = {}  # added to logits, by token id
    bad_words: Annotated[list[Word], Field(max_length=MOST_BANS // 2, fail_fast=True)] = []  # not in the answer
    min_tokens: Natural = 0  # tokens before an end token, at least
    ignore_eos: Switch = False  # end tokens do not end the answer
    seed: Seed = Field(default_factory=lambda: secrets.randbelow(DRAWN_SEEDS))  # default: drawn; part of the answer
    stop: Stop = []  # strings; OpenAI's text ends before a stop string, text-generation-inference's after it
    speculate: Switch = True  # false: plain rounds for all requests while this one runs, unless `--no_plain_requests`
    grammar: Constraint = None  # `{"type": "json", "value": SCHEMA}`, or `"regex"` with a regular expression

    @property
    def length_field(self) -> str:
        """The name of the field that gives the most new tokens, in errors."""
        return "max_completion_tokens" if "max_completion_tokens" in self.model_fields_set else self.LENGTH

    @property
    def samples(self) -> bool:
        return self.temperature >= MIN_TEMPERATURE

    def with_defaults(self, defaults: Mapping[str, Any]) -> Self:
        """Return the spec with these values of fields that the request does not give."""
        missing = {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        return self.model_copy(update=missing)

    def calls(self) -> Calls:
        return Calls()

    def sampling(self) -> SamplingParams:
        """Return the distribution of the next token, without `bad_words`; greedy decoding has no filters."""
        filters = (*FILTERS, "temperature") if self.samples else ()
        values = {name: getattr(self, name) for name in (*EDITS, *filters)}
        return SamplingParams(seed=self.seed, **values | {"top_k": max(0, values.get("top_k", 0))})


def sampling_defaults(model: ModelSource) -> dict[str, Any]:
    """Return the values of a model's generation_config.json by fields of requests. Errors: ConfigError."""
    values = model.generation_config()
    given = {name: values[key] for key, name in RECOMMENDED.items() if values.get(key) is not None}
    try:
        GenerationSpec.model_validate(given)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        key = next(key for key, name in RECOMMENDED.items() if name == wrong["loc"][0])
        what, fix = "generation_config.json has a value that no request may have", "correct the file, or add "
        refuse(
            f"{model.path}: {key}", repr(wrong["input"])[:80], wrong["msg"], what, fix + flag("no_sampling_defaults")
        )
    return given


class Parameters(GenerationSpec):
    """Parameters of text-generation-inference."""

    PROMPT, LENGTH, WITHIN, KEEPS_STOP = "inputs", "parameters.max_new_tokens", "parameters.", True
    GRAMMAR = "parameters.grammar"

    max_tokens: Annotated[Count | None, Field(validation_alias="max_new_tokens")] = None  # default: what fits
    do_sample: Switch | None = None  # if not given: a temperature other than 1 or a filter means sampling
    best_of: Count = 1  # samples, of which the likeliest is answered
    details: Switch = False  # tokens, `timings` and `speculation`
    decoder_input_details: Switch = False  # log-probabilities of the prompt, not in streams
    top_n_tokens: Likeliest = 0  # likeliest tokens in each place
    return_full_text: Switch = False  # the inputs before the answer
    chat: Switch = False  # put the inputs into the chat template

    @property
    def samples(self) -> bool:
        is_filtered = self.temperature != 1 or self.top_k > 0 or min(self.top_p, self.typical_p, 1 - self.min_p) < 1
        return super().samples and (is_filtered if self.do_sample is None else self.do_sample)


class Generate(Body):
    """The body of text-generation-inference's routes."""

    inputs: Text  # the prompt
    parameters: Parameters = Field(default_factory=Parameters)  # all other fields except `stream`
    stream: Switch = False  # send tokens as they come


class StreamOptions(Body):
    include_usage: Switch = False


class OpenAISpec(GenerationSpec):
    """Fields of both routes of OpenAI."""

    model: Text = ""  # without effect: a server has one model
    user: Text = ""  # without effect
    prompt_cache_key: Text = ""  # without effect
    safety_identifier: Text = ""  # without effect
    n: Count = 1  # answers to each prompt, whose random numbers depend on `seed` and the sample's number in the request
    stream: Switch = False  # send tokens as they come
    stream_options: StreamOptions = Field(default_factory=StreamOptions)  # `include_usage`
    grammar: ResponseFormat = None  # JSON: any object, or of a schema; below


class Completion(OpenAISpec):
    """The body of /v1/completions."""

    PROMPT, LENGTH, DEFAULT_LENGTH = "prompt", "max_tokens", 16

    prompt: Text | TokenIds | Annotated[list[Text | TokenIds], Field(fail_fast=True)]  # texts or token ids
    max_tokens: Natural | None = None  # default: 16; with `echo` also 0
    best_of: Count | None = None  # samples of a prompt, of which the `n` of highest mean log-probability are answered
    echo: Switch = False  # the answer begins with the prompt, `logprobs` with those of its tokens after the first
    logprobs: Likeliest | None = None  # of each token, and of this number of likeliest tokens


class TextPart(Body):
    type: Literal["text"]
    text: Text


def joined(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)


# Parts of a text; a text is a single part.
Parts = BeforeValidator(lambda text: [{"type": "text", "text": text}] if isinstance(text, str) else text)
Content = Annotated[list[TextPart], Field(fail_fast=True), Parts]


class Prediction(Body):
    type: Literal["content"]
    content: Content


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class FunctionCall(Body):
    name: Name
    arguments: Arguments = {}


class ToolCall(Body):
    """A call in an earlier answer."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Text = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] = []
    tool_call_id: Text = ""
    content: Content = []
    reasoning_content: Text = ""

    @model_validator(mode="after")
    def _require_content(self) -> "Message":
        if self.role != "assistant" and ("content" not in self.model_fields_set or self.tool_calls):
            raise ValueError("needs content and no tool_calls, unless it is the assistant's")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it: with the arguments of calls as objects."""
        content = None if self.tool_calls and not self.content else joined(self.content)
        more = self.model_dump(exclude_unset=True, include=AS_GIVEN)
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **more}


class ChatCompletion(OpenAISpec):
    """The body of /v1/chat/completions."""

    PROMPT, LENGTH = "messages", "max_tokens"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]  # roles: also developer (system) and tool
    max_completion_tokens: Count | None = None  # default: what fits
    max_tokens: Count | None = None  # its earlier name
    logprobs: Switch = False  # of the chosen tokens
    top_logprobs: Likeliest = 0  # of the likeliest, with `logprobs`
    prediction: Prediction | None = None  # a text like the answer, which `suffix` drafters read
    chat_template_kwargs: Object = {}  # variables for the chat template, such as `{"enable_thinking": false}` for Qwen3
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []  # functions that the answer may call
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"  # none: tools are hidden; required: a call
    parallel_tool_calls: Switch = True  # false: only the first call of an answer counts

    @model_validator(mode="after")
    def _take_length(self) -> Self:
        is_one = None in (self.max_tokens, self.max_completion_tokens)
        require(is_one, "max_tokens", "means max_completion_tokens, which is given too")
        self.max_tokens = self.max_tokens or self.max_completion_tokens
        return self

    def calls(self) -> Calls:
        choice = self.tool_choice
        required = [
            tool.function
            for tool in self.tools
            if choice == "required" or (isinstance(choice, Tool) and choice.function.name == tool.function.name)
        ]
        offered = [] if choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools]
        return Calls(self.chat_template_kwargs, offered, required, None if self.parallel_tool_calls else 1)
