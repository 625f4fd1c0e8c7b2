"""Commands that create self-contained HTML pages of runs. They import neither Prefect nor torch."""

import json
import webbrowser
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, RunName, RunNames, Store
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, table, write

CELL = 32
"""Maximum number of characters of a setting in a table. Longer values are cut off."""
Page = Annotated[Path | None, Parameter(metavar="FILE", show_default="RUN-report.html", help="file for the page")]
ComparisonPage = Annotated[
    Path | None,
    Parameter(
        metavar="FILE", show_default="no page", help="also write a page with curves and completions to this file"
    ),
]
Opened = Annotated[bool, Parameter(name="--open", help="open the page in the browser")]


def report(
    run: RunName, /, *, to: Page = None, opened: Opened = False, store: Store = DEFAULT_STORE, as_json: Json = False
) -> None:
    """Create an HTML page of a run: curves, completions token by token, workers, cost and lineage."""
    from rheostat.tasks.views.report.run import report_page
    from rheostat.tasks.views.runs import open_known_run

    path = to or Path(f"{open_known_run(store, run).name}-report.html")
    _check_path(path)
    size = _write_page(path, report_page(store, run))
    document = {"run": run, "path": str(path), "bytes": size}
    write(json.dumps(document, indent=2) if as_json else f"{path}: {size:,} bytes, one self-contained file")
    if opened:
        webbrowser.open(path.resolve().as_uri())


def compare(
    *runs: RunNames,
    to: ComparisonPage = None,
    opened: Opened = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Compare runs: different settings and inputs, held-out accuracy with a paired test, and learning curves."""
    from rheostat.tasks.views.report.comparison import compare_runs, comparison_page, run_cells

    if opened and to is None:
        raise BadInput("compare --open needs --to FILE, because the page to be opened is written to this file.")
    if to is not None:
        _check_path(to)
    comparison = compare_runs(store, runs)
    if to is not None:
        _write_page(to, comparison_page(store, comparison))
    if as_json:
        write(comparison.model_dump_json(indent=2))
    else:
        settings = comparison.settings.items()
        keys = [{"setting": key, **{run: _shorten(value) for run, value in values.items()}} for key, values in settings]
        lines = [
            table(run_cells(comparison)),
            table(keys) or "no different settings",
            "\n".join(line for pair in comparison.pairs for line in pair.input_lines) or "no different inputs",
            *(p.line for p in comparison.pairs),
        ]
        write("\n\n".join([*lines, *([f"page {to}"] if to else [])]))
    if opened and to is not None:
        webbrowser.open(to.resolve().as_uri())


def _shorten(text: str) -> str:
    """Cut a text off at the maximum width of a table column."""
    return f"{text[: CELL - 1]}…" if len(text) > CELL else text


def _check_path(path: Path) -> None:
    """Raise BadInput if no file can be created at this path. This is checked first, because creating the page takes
    time."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise BadInput(
            f"--to {path} cannot be written, because it is a directory or its parent directory does not exist. Name a "
            "file in an existing directory."
        )


def _write_page(path: Path, text: str) -> int:
    try:
        return path.write_bytes(text.encode())
    except OSError as error:
        raise BadInput(f"--to {path} cannot be written: {error.strerror or error}. Choose another file.") from error
