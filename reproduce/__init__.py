"""Commands. The import comes before all of theirs, so that Ctrl-C ends them with a line from their start."""

from common import cli
