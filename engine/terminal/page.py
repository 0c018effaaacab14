"""A comparison as one page for a browser: both texts of every row, and where each token came from."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from engine.terminal.panes import TITLES
from engine.terminal.track import Token, Track

# Nothing in it is loaded from elsewhere.
PAGE = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page_of(names: Sequence[str], tracks: Mapping[str, Track], figures: Sequence[str]) -> str:
    """HTML of all rows of both passes, by name, below the lines of figures."""
    rows = []
    for index, name_of_row in enumerate(names):
        texts = [
            f'<div><h3>{title}</h3><p class="text">{_spans(tracks[name].rows[index], name)}</p></div>'
            for name, title in TITLES.items()
        ]
        begins = escape(name_of_row)
        rows.append(f'<h2>row {index}</h2>\n<p class="prompt">{begins}</p>\n<div class="pair">{"".join(texts)}</div>')
    said = "\n".join(f"<p>{escape(line)}</p>" for line in figures)
    return PAGE.substitute(figures=said, rows="\n".join(rows))


def _spans(tokens: Sequence[Token], name: str) -> str:
    kinds = {True: "draft", False: "own"} if name == "speculation" else {}
    return "".join(
        f'<span{f" class={kinds[token.drafted]}" if kinds else ""} title="token {place}, round {token.round}">'
        f"{escape(token.text)}</span>"
        for place, token in enumerate(tokens)
    )
