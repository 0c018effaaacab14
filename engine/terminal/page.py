"""A comparison as one page for a browser: both texts of every row, and where each token came from."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from engine.terminal.panes import TITLES
from engine.terminal.track import Track

# Nothing in it is loaded from elsewhere.
PAGE = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True).get_template("page.html")


def page_of(names: Sequence[str], tracks: Mapping[str, Track], figures: Sequence[str]) -> str:
    """HTML of all rows of both passes, by name, below the lines of figures."""
    return PAGE.render(names=names, tracks=tracks, figures=figures, titles=TITLES)
