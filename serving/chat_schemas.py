"""The body of /v1/chat/completions: conversations, tools and their calls."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator
from pydantic_core import from_json

from serving.schemas import Body, Calls, Count, Function, Likeliest, Name, Object, OpenAISpec, Switch, Text

# Fields of messages that chat templates read as they are.
AS_GIVEN = {"name", "tool_calls", "tool_call_id", "reasoning_content"}
LENGTHS = AliasChoices("max_completion_tokens", "max_tokens")
Arguments = Annotated[Object, BeforeValidator(lambda text: from_json(text or "{}") if isinstance(text, str) else text)]


class TextPart(Body):
    type: Literal["text"]
    text: Text


def _parts(text: Any) -> Any:
    return [{"type": "text", "text": text}] if isinstance(text, str) else text


def joined(parts: Sequence[TextPart]) -> str:
    return "".join(part.text for part in parts)


# Parts of a text; a text is a single part.
Content = Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(_parts)]


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

    PROMPT, LENGTH = "messages", "max_completion_tokens"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]  # roles: also developer (system) and tool
    max_tokens: Annotated[Count | None, Field(validation_alias=LENGTHS)] = None  # default: what fits
    logprobs: Switch = False  # of the chosen tokens
    top_logprobs: Likeliest = 0  # of the likeliest, with `logprobs`
    prediction: Prediction | None = None  # a text like the answer, which `suffix` drafters read
    chat_template_kwargs: Object = {}  # variables for the chat template, such as `{"enable_thinking": false}` for Qwen3
    tools: Annotated[list[Tool], Field(fail_fast=True)] = []  # functions that the answer may call
    tool_choice: Literal["none", "auto", "required"] | Tool = "auto"  # none: tools are hidden; required: a call
    parallel_tool_calls: Switch = True  # false: only the first call of an answer counts

    def calls(self) -> Calls:
        choice = self.tool_choice
        required = [
            tool.function
            for tool in self.tools
            if choice == "required" or (isinstance(choice, Tool) and choice.function.name == tool.function.name)
        ]
        offered = [] if choice == "none" else [tool.model_dump(exclude_unset=True) for tool in self.tools]
        return Calls(self.chat_template_kwargs, offered, required, None if self.parallel_tool_calls else 1)
