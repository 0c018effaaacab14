"""The table of the fields that requests may have, made of the server's schemas."""

import ast
import json
import re
from pathlib import Path

from reproduce.helpers.records import Record
from serving import schemas


def request_fields() -> list[Record]:
    """Return a row for each field of requests, with the comment next to it in the schemas."""
    source = Path(schemas.__file__).read_text(encoding="utf-8")
    lines, comments, rows = source.splitlines(), dict[tuple[str, str], str](), dict[tuple[str, str], Record]()
    for node in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        for line in (line for line in node.body if isinstance(line, ast.AnnAssign)):
            of_field = "\n".join(lines[line.lineno - 1 : line.end_lineno])
            comments[node.name, ast.unparse(line.target)] = (re.findall("  # (.*)", of_field) or [""])[-1]
    kinds: dict[type[schemas.Body], str] = {schemas.Completion: "completions", schemas.ChatCompletion: "chats"}
    kinds |= dict.fromkeys((schemas.Generate, schemas.Parameters), "text-generation-inference")
    known = set[object]()
    for kind, route in kinds.items():
        for name, field in kind.model_fields.items():
            aliases = getattr(field.validation_alias, "choices", [field.validation_alias or name])
            names, known = ", ".join(f"`{each}`" for each in aliases), known.union(aliases)
            about = next(comments[key] for parent in kind.__mro__ if (key := (parent.__name__, name)) in comments)
            rows.setdefault((names, about), {"field": names, "about": about})[route] = "yes"
    neutral: dict[str, list[str]] = {}
    for name in schemas.NEUTRAL.keys() - known:
        values = " or ".join(f"`{json.dumps(value)}`" for value in schemas.NEUTRAL[name])
        neutral.setdefault(f"only {values}, without effect", []).append(f"`{name}`")
    more = [{"field": ", ".join(sorted(names)), "about": about} for about, names in sorted(neutral.items())]
    return [*rows.values(), *more]
