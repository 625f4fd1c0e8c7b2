"""SQL queries over the runs of a store, executed by DuckDB.

Nothing is written to the store. The data that a query names is copied to a temporary directory, except exported
iterations, which are read directly. A query can neither read nor write other files.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.guard import guarded_directory
from rheostat.infra.store.runs import Run, list_runs
from rheostat.infra.store.storage import open_store
from rheostat.tasks.run.batch import iterations_without_rollouts
from rheostat.tasks.run.keys import iteration_key
from rheostat.tasks.views.export import export_file, export_tables, write_export
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import open_known_run
from rheostat.tasks.views.tables import TABLES

VIEWS: Final = ("rollouts", *TABLES)

_READ_STATEMENTS: Final = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN, duckdb.StatementType.CREATE)
"""Types of SQL statements that a query may contain, because they write no file."""
_LITERALS: Final = re.compile(r"'(?:[^']|'')*'|--[^\n]*")
"""String literals and comments in a query."""


def query_runs(store: str, sql: str, *, names: Sequence[str]) -> pa.Table:
    """Run a SQL query on the completed iterations of the named runs, or of all runs if none are named.

    Only the views that the query names are built. `rollouts` has a row for each completion with its scores. `scores`
    has a row for each reward term of each completion, including rescorings, with verdicts. `samples` has the
    advantages of each training sample. `iterations` has the metrics and costs of each iteration, with names such as
    `update_entropy` for `update/entropy`. `policies` has a row for each policy version. Values that a run does not have
    are null.

    Raises BadInput if DuckDB cannot run the query, if the query would read or write other files, or if no run has a
    completed iteration.
    """
    runs = [
        run for run in (open_known_run(store, name) for name in names or list_runs(store)) if sealed_iterations(run)
    ]
    where = ", ".join(map(repr, names)) or f"the runs of {open_store(store).uri}"
    if not runs:
        raise BadInput(f"{where}: there is no completed iteration to query. Wait until the first iteration ends.")
    with guarded_directory("rheostat-query-") as scratch, duckdb.connect() as database:
        database.execute("SET temp_directory = ?", [str(scratch / "spilled")])
        try:
            _check_reads_only(sql)
            readable: list[str] = []
            for view in _named_views(database, sql):
                files = [str(path) for run in runs for path in _view_files(run, view, scratch)]
                if not files:
                    raise BadInput(
                        f"{where}: the table {view} cannot be read, because all of its data was deleted. Query a run "
                        "that still has this data."
                    )
                database.read_parquet(files, union_by_name=True).create_view(view)
                readable += files
            _close_files(database, readable)
            answer = database.sql(sql)
            return pa.table({}) if answer is None else answer.to_arrow_table()
        except duckdb.Error as error:
            raise BadInput(f"{_describe_error(error)} (tables: {', '.join(VIEWS)})") from error


def _check_reads_only(sql: str) -> None:
    """Raise BadInput if a query contains a statement that could write a file. CREATE is allowed, because DuckDB
    rewrites PIVOT to a CREATE in memory."""
    for statement in duckdb.extract_statements(sql):
        if statement.type not in _READ_STATEMENTS:
            raise BadInput(
                f"A query can only read, but this one contains a {statement.type.name} statement. Use SELECT. To "
                "write files, use `rheostat query --json > FILE`, or `rheostat export` for Parquet."
            )


def _close_files(database: duckdb.DuckDBPyConnection, readable: Sequence[str]) -> None:
    """Let the database read only these files, and lock the settings that enforce this."""
    database.execute("SET allowed_paths = $readable", {"readable": list(readable)})
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")


def _named_views(database: duckdb.DuckDBPyConnection, sql: str) -> list[str]:
    """Return the views that must be built for a query, because it names them.

    DuckDB cannot list the tables of some queries before the tables exist. For these, every view whose name occurs in
    the query is returned. Raises duckdb.ParserException if the text is not valid SQL.
    """
    try:
        names = database.get_table_names(sql)
    except duckdb.ParserException:
        raise
    except duckdb.Error:
        names = set(re.findall(r"\w+", _LITERALS.sub(" ", sql)))
    folded_names = {name.casefold() for name in names}
    return [view for view in VIEWS if view in folded_names]


def _view_files(run: Run, view: str, scratch: Path) -> Iterator[Path]:
    """Write the rows of a view for one run to local Parquet files and yield them. Deleted data is skipped."""
    if view == "rollouts":
        yield from _rollout_files(run, scratch)
        return
    tables = TABLES[view](run)
    if (first := next(tables, None)) is not None:
        path = scratch / f"{view}-{run.name}.parquet"
        write_export(chain([first], tables), path, key=view)
        yield path


def _rollout_files(run: Run, scratch: Path) -> Iterator[Path]:
    """Yield one Parquet file for each iteration whose rollouts are stored. An already exported file is reused."""
    numbers = range(1, len(sealed_iterations(run)) + 1)
    deleted = iterations_without_rollouts(run, numbers)
    for number in numbers:
        key = iteration_key(number)
        if run.store.exists(export_file(key)):
            yield run.store.local_path(export_file(key))
        elif number not in deleted:
            path = scratch / f"{run.name}-{key}.parquet"
            write_export(export_tables(run, number), path, key=key)
            yield path


def _describe_error(error: duckdb.Error) -> str:
    """Return DuckDB's error message in one line, without the marker of the position."""
    return " ".join(str(error).replace("^", "").split())
