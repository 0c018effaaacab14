"""Commands of the pages."""

import re
import shlex
from pathlib import Path

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# A command within a sentence.
INLINE = re.compile(r"`((?:python|torchrun) [^`]+)`")


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command of a page that starts Python, with 1 in the place of a shell's variables."""
    text = page.read_text(encoding="utf-8")
    blocks = [block for language, block in FENCED.findall(text) if language in ("", "bash")]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines += [" ".join(command.split()) for command in INLINE.findall(FENCED.sub("", text))]
    found = []
    for line in lines:
        words = [re.sub(r"\$\{?\w+\}?", "1", word) for word in shlex.split(line, comments=True)]
        starts = [i for i, word in enumerate(words) if Path(word).name in ("python", "torchrun")]
        found += [[Path(words[starts[0]]).name, *words[starts[0] + 1 :]]] if starts else []
    return found
