"""What requests may say. Parameters that clients know and this server has not are refused, unless they ask for nothing.

A value that a parameter has no effect with is taken: clients send some of them whether asked to or not.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError


def only(*neutral: Any) -> AfterValidator:
    """Of a parameter that is not supported: these values, and null, ask for nothing."""

    def check(value: Any) -> Any:
        if value is None or any(type(value) in (type(one), int, float) and value == one for one in neutral):
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


Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Count = Annotated[int, Field(ge=1, lt=2**31, strict=True)]
Mass = Annotated[float, Field(gt=0, le=1)]
Heat = Annotated[float, Field(ge=1e-5, le=1e6)]


class Parameters(Body):
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
    best_of: Annotated[Any, only(1)] = None
    repetition_penalty: Annotated[Any, only(1)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    typical_p: Annotated[Any, only(1)] = None
    top_n_tokens: Annotated[Any, only(0)] = None
    watermark: Annotated[Any, only(False)] = None
    decoder_input_details: Annotated[Any, only(False)] = None
    grammar: Annotated[Any, only()] = None
    adapter_id: Annotated[Any, only()] = None

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


class GenerateOrStream(Generate):
    stream: bool | None = None


class Tokenize(Body):
    inputs: Text
    add_special_tokens: bool = True


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, only(False)] = None


class Completion(Body):
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
    n: Annotated[Any, only(1)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    logit_bias: Annotated[Any, only({})] = None

    @property
    def sampling(self) -> tuple[float, int, float, int | None]:
        temperature = 1.0 if self.temperature is None else self.temperature
        greedy = temperature == 0
        return temperature, 0 if greedy else self.top_k or 0, 1.0 if greedy else self.top_p or 1.0, self.seed

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31, strict=True)]], Field(min_length=1)]


class TextCompletion(Completion):
    """logprobs: 0 for those of the chosen tokens."""

    prompt: Text | TokenIds | Annotated[list[Text], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=0, strict=True)] | None = None
    best_of: Annotated[Any, only(1)] = None
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Annotated[Text, Field(max_length=64)]
    content: Text | list[TextPart] | None = None
    name: Annotated[Any, only()] = None
    tool_calls: Annotated[Any, only([])] = None
    tool_call_id: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    refusal: Annotated[Any, only()] = None
    audio: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    reasoning: Annotated[Any, only()] = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatCompletion(Completion):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Any, only(0)] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    tool_prompt: Annotated[Any, only()] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, only(True, False)] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    prediction: Annotated[Any, only()] = None
    reasoning_effort: Annotated[Any, only()] = None
    verbosity: Annotated[Any, only()] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    store: Annotated[Any, only(False)] = None
    metadata: Annotated[Any, only({})] = None
    web_search_options: Annotated[Any, only()] = None
