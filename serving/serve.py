"""foretoken.py serve, and `python -m serving`: the server."""

from dataclasses import dataclass

from serving.flags import ServeFlags
from serving.server import serve


@dataclass(frozen=True, kw_only=True)
class Serve(ServeFlags):
    """an HTTP server with the routes of text-generation-inference and OpenAI, over speculative decoding"""

    def run(self) -> None:
        serve(self)
