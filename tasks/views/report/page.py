"""A page that is one file: it fetches nothing, and its own script is the only one that runs in it.

What a policy wrote is in it as JSON, which the script hands on as text, or as escaped text.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Final

from pydantic import JsonValue

from infra.config import Settings
from tasks.config.documents import toml_key, toml_value
from tasks.views.report.curves import DrawnChart, draw
from tasks.views.report.numbers import ChartPlan, Columns
from tasks.views.report.samples import BrowsedGroup

_HERE: Final = files("tasks.views.report")


class PageSection(Settings):
    """A part of a page."""

    name: str
    """Its place in the page's address."""
    title: str
    """Its heading."""
    body: str
    """HTML."""


class Browsed(Settings):
    """What a page's browser of completions has."""

    groups: list[BrowsedGroup] = []
    """Whole groups."""
    images: dict[str, str] = {}
    """What their prompts show and completions are, as `data:image/...;base64,...`, by digest."""
    terms: tuple[str, ...] = ()
    """Reward terms."""
    batch: str = ""
    """What is shown at first: the last iteration or evaluation."""
    beside: str = ""
    """What is shown beside it at first."""


def page(
    title: str,
    subtitle: str,
    sections: Sequence[PageSection],
    *,
    columns: Columns,
    charts: Sequence[tuple[ChartPlan, DrawnChart]],
    browsed: Browsed,
    by: str = "iteration",
) -> str:
    """Put a page together."""
    script, style = (_HERE.joinpath(name).read_text() for name in ("page.js", "page.css"))
    return Template(_HERE.joinpath("page.html").read_text()).substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        links="".join(f'<a href="#{each.name}">{escape(each.title)}</a>' for each in sections),
        sections="\n".join(
            f'<section id="{each.name}"><h2>{escape(each.title)}</h2>\n{each.body}</section>' for each in sections
        ),
        style=style,
        script=script,
        script_digest=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        data=_data(columns, charts, browsed, by=by),
    )


def _data(columns: Columns, charts: Sequence[tuple[ChartPlan, DrawnChart]], browsed: Browsed, *, by: str) -> str:
    """What the script reads, as JSON without `<`: no text in it can end its element."""
    told: dict[str, object] = {
        "by": by,
        "columns": columns,
        "rows": [number for number in range(_length(columns)) if any(v[number] is not None for v in columns.values())],
        "charts": [
            {
                "left": drawn.left, "right": drawn.right, "first": drawn.first, "last": drawn.last, "by": by,
                "lines": [line.model_dump() for line in plan.lines],
            }
            for plan, drawn in charts
        ],
        **browsed.model_dump(mode="json", exclude={"groups"}),
        "groups": [group.model_dump(mode="json", exclude_defaults=True) for group in browsed.groups],
    }  # fmt: skip
    text = json.dumps(told, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _length(columns: Columns) -> int:
    return max((len(values) for values in columns.values()), default=0)


def drawn_charts(plans: Iterable[ChartPlan], columns: Columns) -> list[tuple[ChartPlan, DrawnChart]]:
    """Draw what charts show."""
    return [(plan, draw(plan.chart(columns))) for plan in plans]


def figures(charts: Sequence[tuple[ChartPlan, DrawnChart]]) -> str:
    """Show charts side by side, each above the place where the script tells what is under the pointer."""
    return (
        '<div class="charts">'
        + "".join(
            f"<figure><h3>{escape(drawn.title)}</h3>"
            f'<div class="plot" id="chart-{place}" tabindex="0" aria-describedby="told-{place}">{drawn.svg}</div>'
            f'<figcaption id="told-{place}">{escape(_last(drawn))}</figcaption></figure>'
            for place, (_, drawn) in enumerate(charts)
        )
        + "</div>"
    )


def _last(drawn: DrawnChart) -> str:
    """What is told of a chart where there is no pointer: from where its lines go where."""
    parts = []
    for series in drawn.series:
        known = [value for value in series.values if value is not None]
        parts.append(f"{series.name} {known[0]:.4g} → {known[-1]:.4g}")
    return ", ".join(parts)


def rows_table(rows: Sequence[Mapping[str, object]], *, words: bool = False) -> str:
    """A table of rows with the same keys; nothing where there is none. Columns of words are set as such."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row.values())}</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def browser() -> str:
    """Where the script shows completions."""
    return _HERE.joinpath("browser.html").read_text()


def toml(config: Mapping[str, JsonValue]) -> str:
    """Spell a configuration as TOML, a dotted key each line; what has no value is left out."""
    return "\n".join(f"{key} = {toml_value(value)}" for key, value in _dotted(config) if value is not None)


def _dotted(config: Mapping[str, JsonValue], prefix: str = "") -> Iterable[tuple[str, JsonValue]]:
    for key, value in config.items():
        name = f"{prefix}{toml_key(key)}"
        if isinstance(value, Mapping) and value:
            yield from _dotted(value, f"{name}.")
        else:
            yield name, value
