"""What requests may say. Parameters that clients know and this server has not are refused, unless they ask for nothing.

Lists end at the first value that is wrong: bodies are checked on the event loop, and may have a million of them.
"""

import secrets
import tomllib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from engine.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingParams

# Seeds that are drawn are whole numbers in every language: JavaScript's end at 2**53.
DRAWN_SEEDS = 2**32
OF_CLASS = tomllib.loads(Path(__file__).with_name("refused.toml").read_text())
MOST_TOKENS, MOST_MESSAGES, MOST_PARTS, MOST_STRINGS = 2**20, 1024, 32, 256


def _encodable(text: str) -> str:
    """JSON has escapes for halves of a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "has half a character (a lone surrogate)") from None
    return text


def _zero_or_more(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise PydanticCustomError("temperature", f"is 0 (greedy), or {MIN_TEMPERATURE} and more")
    return temperature


def _one_prompt(given: Any) -> Any:
    """A list of one prompt is that prompt."""
    if isinstance(given, list) and any(isinstance(one, str | list) for one in given[:1]):
        if given[1:]:
            raise PydanticCustomError("prompt", "is not one prompt: a text, or its token ids")
        return given[0]
    return given


Text = Annotated[str, AfterValidator(_encodable)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Switch = Annotated[bool, Field(strict=True)]
Mass = Annotated[float, Field(gt=0, le=1, strict=True)]
Heat = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, strict=True)]
HeatOrGreedy = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, strict=True), AfterValidator(_zero_or_more)]
Strings = Annotated[list[Text], Field(max_length=MOST_STRINGS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_TOKENS, fail_fast=True)]


def _with_refused(schema: dict[str, Any], kind: type[Any]) -> None:
    schema["properties"] |= {name: {"description": "not supported"} for name in kind.REFUSED}


class Body(BaseModel):
    """REFUSED: its own of the file's parameters, and the values of each that ask for nothing."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, json_schema_extra=_with_refused)
    REFUSED: ClassVar[dict[str, list[Any]]] = {}

    def __init_subclass__(cls) -> None:
        cls.REFUSED = cls.REFUSED | OF_CLASS.get(cls.__name__, {})

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, given: Any) -> Any:
        known = cls.__pydantic_fields__
        if not isinstance(given, dict) or given.keys() <= known.keys():
            return given
        for name in (name for name in given if name not in known):
            if name not in cls.REFUSED:
                raise cls._about(name, "is not a parameter of this route")
            value = given[name]
            is_neutral = (type(value) in (type(one), int, float) and value == one for one in cls.REFUSED[name])
            if value is not None and not any(is_neutral):
                raise cls._about(name, "is not supported: leave it out")
        return {name: value for name, value in given.items() if name in known}

    @classmethod
    def _about(cls, name: str, message: str) -> ValidationError:
        name = name[:80].encode(errors="replace").decode()  # it may have half a character
        error = InitErrorDetails(type=PydanticCustomError("unsupported", message), loc=(name,), input=None)
        return ValidationError.from_exception_data(cls.__name__, [error])


class Decoding(Body):
    """What both families call the same."""

    temperature: HeatOrGreedy | None = None
    top_p: Mass | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31, strict=True)] | None = None
    seed: Seed | None = None
    stop: Text | Strings | None = None
    speculate: Switch = True

    @property
    def heat(self) -> float:
        return 1.0 if self.temperature is None else self.temperature

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self) -> SamplingParams:
        """A seed that is not given is drawn. Greedy decoding has no filters."""
        seed = secrets.randbelow(DRAWN_SEEDS) if self.seed is None else self.seed
        filters = (self.top_k or 0, self.top_p or 1.0) if self.heat else (0, 1.0)
        return SamplingParams(self.heat, *filters, seed)


class Parameters(Decoding):
    """Of text-generation-inference. do_sample: false is greedy, whatever else is given; absent, a temperature other
    than 1, top_k or top_p asks for samples. chat: the inputs are what a user says, in the model's chat template."""

    max_new_tokens: Count | None = None
    do_sample: Switch | None = None
    temperature: Heat | None = None
    top_k: Count | None = None
    stop: Strings | None = None
    truncate: Count | None = None
    details: Switch | None = None
    return_full_text: Switch | None = None
    chat: Switch = False

    @property
    def heat(self) -> float:
        has_filter = self.top_k is not None or (self.top_p or 1) < 1
        samples = has_filter or super().heat != 1 if self.do_sample is None else self.do_sample
        return super().heat if samples else 0.0


class Generate(Body):
    inputs: Text
    parameters: Parameters | None = None

    @property
    def own(self) -> Parameters:
        return self.parameters or Parameters()


class GenerateOrStream(Generate):
    stream: Switch | None = None


class Tokenize(Body):
    inputs: Text
    add_special_tokens: Switch = True


class StreamOptions(Body):
    include_usage: Switch | None = None


class Completion(Decoding):
    """What both of OpenAI's routes take. model and user are for the client's own use: one server has one model."""

    model: Text | None = None
    user: Text | None = None
    max_tokens: Count | None = None
    stream: Switch | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise self._about("stream_options", "is for streams: leave it out, or add stream")
        return self


class TextCompletion(Completion):
    """logprobs: 0 for those of the chosen tokens."""

    prompt: Annotated[Text | TokenIds, BeforeValidator(_one_prompt)]
    logprobs: Annotated[int, Field(ge=0, le=0, strict=True)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type", "text") != "text":
            raise cls._about("type", "is not supported: parts are of type text")
        return given


class Message(Body):
    role: Literal["system", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise self._about("content", f"is missing: a message of the {self.role} has one")
        return self

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatCompletion(Completion):
    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise self._about("max_tokens", "is the same as max_completion_tokens: leave one out")
        return self

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: Switch | None = None
