"""What a client is refused with, or told instead of an answer."""

from collections.abc import Mapping
from typing import Any

from common.errors import UserError


class Failure(Exception):
    """status: of HTTP. kind: text-generation-inference's `error_type`, and OpenAI's `code`. param: what it is about."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.param, self.headers = status, kind, message, param, headers

    def body(self, is_openai: bool) -> dict[str, Any]:
        """As the routes of that family say it."""
        if not is_openai:
            return {"error": self.message, "error_type": self.kind}
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        type_ = kinds.get(self.status, "invalid_request_error" if self.status < 424 else "server_error")
        return {"error": {"message": self.message, "type": type_, "param": self.param, "code": self.kind}}


def invalid(param: str, message: str) -> Failure:
    """A value that cannot be had, by the name of the parameter."""
    return Failure(422, "validation", f"{param}: {message}", param)


def refused(param: str, error: UserError) -> Failure:
    """The same of a value that the engine or a template refuses: what is wrong, and what was seen."""
    what, *lines = str(error).splitlines()
    seen = next((line.partition(":")[2].strip() for line in lines if line.strip().startswith("seen:")), "")
    return invalid(param, f"{what}: {seen}")
