"""Reports as a single HTML file. The file loads nothing else, and only its own script may run in it.

The page contains completions either as JSON, which its script inserts as plain text, or as escaped text.
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

from rheostat.infra.config import Settings
from rheostat.tasks.config.documents import toml_key, toml_value
from rheostat.tasks.views.report.curves import DrawnChart, draw
from rheostat.tasks.views.report.numbers import ChartPlan, Columns
from rheostat.tasks.views.report.samples import BrowsedGroup

_HERE: Final = files("rheostat.tasks.views.report")


class PageSection(Settings):
    """Section of a report with heading and content."""

    name: str
    """Anchor of the section in the page's address."""
    title: str
    """Heading of the section."""
    body: str
    """Content of the section as HTML."""


class Browsed(Settings):
    """Completions that a reader can browse in a report, with the iterations that are shown at first."""

    groups: list[BrowsedGroup] = []
    """Groups of completions (one prompt each) from some iterations and evaluations."""
    images: dict[str, str] = {}
    """Images of prompts and completions as `data:image/...;base64,...` addresses, by digest."""
    terms: tuple[str, ...] = ()
    """Names of the reward terms."""
    batch: str = ""
    """Key of the iteration or evaluation that is shown at first, usually the last one."""
    beside: str = ""
    """Key of the iteration or evaluation that is shown next to `batch` at first. Empty if there is only one."""


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
    """Return the HTML of a report. `columns`, `charts` and `browsed` are data for the script of the page, and `by`
    names the unit of the horizontal axis."""
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
        data=_encode_data(columns, charts, browsed, by=by),
    )


def _encode_data(columns: Columns, charts: Sequence[tuple[ChartPlan, DrawnChart]], browsed: Browsed, *, by: str) -> str:
    """Return the data for the page's script as JSON. Every `<` is escaped, so that no text can close the `<script>`
    element."""
    document: dict[str, object] = {
        "by": by,
        "columns": columns,
        "rows": [n for n in range(_num_rows(columns)) if any(values[n] is not None for values in columns.values())],
        "charts": [
            {
                "left": drawing.left, "right": drawing.right, "first": drawing.first, "last": drawing.last, "by": by,
                "lines": [line.model_dump() for line in plan.lines],
            }
            for plan, drawing in charts
        ],
        **browsed.model_dump(mode="json", exclude={"groups"}),
        "groups": [group.model_dump(mode="json", exclude_defaults=True) for group in browsed.groups],
    }  # fmt: skip
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _num_rows(columns: Columns) -> int:
    return max((len(values) for values in columns.values()), default=0)


def drawn_charts(plans: Iterable[ChartPlan], columns: Columns) -> list[tuple[ChartPlan, DrawnChart]]:
    """Draw charts and return each of them with its SVG."""
    return [(plan, draw(plan.chart(columns))) for plan in plans]


def figures(charts: Sequence[tuple[ChartPlan, DrawnChart]]) -> str:
    """Return the HTML of several charts next to each other. Below each chart the script shows the values under the
    pointer."""
    return (
        '<div class="charts">'
        + "".join(
            f"<figure><h3>{escape(drawing.title)}</h3>"
            f'<div class="plot" id="chart-{place}" tabindex="0" aria-describedby="told-{place}">{drawing.svg}</div>'
            f'<figcaption id="told-{place}">{escape(_describe_ends(drawing))}</figcaption></figure>'
            for place, (_, drawing) in enumerate(charts)
        )
        + "</div>"
    )


def _describe_ends(drawing: DrawnChart) -> str:
    """Return the first and last value of each series as a text. The page shows it while no pointer is over
    the chart."""
    parts = []
    for series in drawing.series:
        known = [value for value in series.values if value is not None]
        parts.append(f"{series.name} {known[0]:.4g} → {known[-1]:.4g}")
    return ", ".join(parts)


def rows_table(rows: Sequence[Mapping[str, object]], *, words: bool = False) -> str:
    """Return an HTML table in which each row is one mapping from column heading to value. Empty if there are no rows.

    `words` marks the table as text, for which the style sheet has a separate layout.
    """
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row.values())}</tr>" for row in rows)
    kind = ' class="words"' if words else ""
    return f'<div class="scroll"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    """Return plain text as an HTML paragraph."""
    return f"<p>{escape(text)}</p>"


def browser() -> str:
    """Return the HTML element in which the page's script shows completions."""
    return _HERE.joinpath("browser.html").read_text()


def toml(config: Mapping[str, JsonValue]) -> str:
    """Return a configuration as TOML with one dotted key per line. Settings without a value are left out."""
    return "\n".join(f"{key} = {toml_value(value)}" for key, value in _flatten(config) if value is not None)


def _flatten(config: Mapping[str, JsonValue], prefix: str = "") -> Iterable[tuple[str, JsonValue]]:
    for key, value in config.items():
        name = f"{prefix}{toml_key(key)}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value
