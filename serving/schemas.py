"""What requests may say. Parameters that clients know and this server has not are refused, unless they ask for nothing.

A value that a parameter has no effect with is taken: clients send some of them whether asked to or not.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError


def only(neutral: Any) -> AfterValidator:
    """Of a parameter that is not supported: this value, and null, ask for nothing."""

    def check(value: Any) -> Any:
        if value is None or (type(value) in (type(neutral), int, float) and value == neutral):
            return value
        raise PydanticCustomError("unsupported", "is not supported: leave it out")

    return AfterValidator(check)


def _encodable(text: str) -> str:
    """JSON has escapes for halves of a character, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "has half a character (a lone surrogate)") from None
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


def refusing(neutral: Mapping[str, Any]) -> Any:
    """A body whose parameters are not supported, with the value of each that asks for nothing."""
    fields: dict[str, Any] = {name: (Annotated[Any, only(value)], None) for name, value in neutral.items()}
    return create_model("Refusing", __base__=Body, **fields)


Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Mass = Annotated[float, Field(gt=0, le=1)]
Heat = Annotated[float, Field(ge=1e-5, le=1e6)]


NO_PENALTIES: Any = {"best_of": 1, "repetition_penalty": 1, "frequency_penalty": 0, "typical_p": 1, "top_n_tokens": 0}
NO_OTHERS = {"watermark": False, "decoder_input_details": False, "grammar": None, "adapter_id": None}
TgiRefusing: Any = refusing(NO_PENALTIES | NO_OTHERS)


class Parameters(TgiRefusing):
    """Of text-generation-inference. do_sample: false is greedy, whatever else is given; absent, a temperature other
    than 1, top_k or top_p asks for samples. chat: the inputs are what a user says, in the model's chat template."""

    max_new_tokens: Count | None = None
    do_sample: bool | None = None
    temperature: Heat | None = None
    top_k: Count | None = None
    top_p: Mass | None = None
    seed: Seed | None = None
    stop: list[Text] | None = None
    truncate: Count | None = None
    details: bool | None = None
    return_full_text: bool | None = None
    speculate: bool = True
    chat: bool = False

    @property
    def samples(self) -> bool:
        has_filter = self.top_k is not None or (self.top_p or 1) < 1
        return has_filter or (self.temperature or 1) != 1 if self.do_sample is None else self.do_sample

    @property
    def sampling(self) -> tuple[float, int, float, int | None]:
        if not self.samples:
            return 0.0, 0, 1.0, self.seed
        return self.temperature or 1.0, self.top_k or 0, self.top_p or 1.0, self.seed


class Generate(Body):
    inputs: Text
    parameters: Parameters | None = None

    @property
    def own(self) -> Parameters:
        return self.parameters or Parameters()


class GenerateOrStream(Generate):
    stream: bool | None = None


class Tokenize(Body):
    inputs: Text
    add_special_tokens: bool = True


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


Refusing: Any = refusing({"n": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}})


class Completion(Refusing):
    """What both of OpenAI's routes take. model and user are for the client's own use: one server has one model."""

    model: str | None = None
    user: str | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Mass | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31, strict=True)] | None = None
    seed: Seed | None = None
    stop: Text | list[Text] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculate: bool = True

    @property
    def sampling(self) -> tuple[float, int, float, int | None]:
        temperature = 1.0 if self.temperature is None else self.temperature
        greedy = temperature == 0
        return temperature, 0 if greedy else self.top_k or 0, 1.0 if greedy else self.top_p or 1.0, self.seed

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]], Field(min_length=1)]


TextRefusing: Any = refusing({"best_of": 1, "echo": False, "suffix": ""})


class TextCompletion(TextRefusing, Completion):
    """logprobs: 0 for those of the chosen tokens."""

    prompt: Text | TokenIds | Annotated[list[Text], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=0, strict=True)] | None = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


NO_CALLS: Any = {"name": None, "tool_calls": [], "tool_call_id": None, "function_call": None}
NO_MEDIA: Any = {"refusal": None, "audio": None, "annotations": [], "reasoning": None}
MessageRefusing: Any = refusing(NO_CALLS | NO_MEDIA)


class Message(MessageRefusing):
    role: Annotated[Text, Field(max_length=64)]
    content: Text | list[TextPart] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


NO_TOOLS: Any = {"tools": [], "tool_choice": "none", "tool_prompt": None, "parallel_tool_calls": False}
NO_TOOLS |= {"functions": [], "function_call": "none", "web_search_options": None}
NO_FORMS: Any = {"top_logprobs": 0, "response_format": {"type": "text"}, "modalities": ["text"], "audio": None}
NO_FORMS |= {"prediction": None, "reasoning_effort": None, "verbosity": None}
NO_SERVICE = {"service_tier": "auto", "store": False, "metadata": {}}
ChatRefusing: Any = refusing(NO_TOOLS | NO_FORMS | NO_SERVICE)


class ChatCompletion(ChatRefusing, Completion):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
