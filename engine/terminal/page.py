"""A comparison as one page for a browser: both texts of every row, and where each token came from."""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from engine.terminal.panes import TITLES
from engine.terminal.track import Token, Track

# Nothing in it is loaded from elsewhere.
PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Plain decoding and speculation</title>
<style>
:root { color-scheme: light dark; --faint: light-dark(#667, #99a); --line: light-dark(#dde, #334) }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: auto; padding: 1rem;
  color: light-dark(#112, #dde); background: light-dark(#fff, #111318) }
h1 { font-size: 1.4rem }
h2 { font-size: 1rem; margin: 2rem 0 0; border-top: 1px solid var(--line); padding-top: 1rem }
h3 { font-size: .85rem; font-weight: normal; color: var(--faint); margin: 0 }
.prompt { color: var(--faint) }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: 1rem 2rem }
.prompt, .text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .25rem 0 }
.draft { background: light-dark(#cdeed6, #1c4a2d); border-radius: 2px }
.own { background: light-dark(#fde3b5, #5a4210); border-radius: 2px }
span[title]:hover { outline: 1px solid var(--faint) }
</style>
</head>
<body>
<h1>Plain decoding and speculation</h1>
$figures
<p><span class="draft">accepted draft</span> <span class="own">the target's own token</span></p>
$rows
</body>
</html>
""")


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
