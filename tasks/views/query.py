"""SQL over the runs of a store, by DuckDB: what `export` would write, and the iterations in numbers.

Nothing is written to the store: iterations that were not exported yet are copied to a temporary directory.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from infra.errors import BadInput
from infra.processes.guard import guarded_directory
from infra.store.runs import Run, list_runs
from infra.store.storage import open_store
from tasks.run.batch import without_rollouts
from tasks.run.keys import iteration_key
from tasks.views.export import export_file, exported, write_export
from tasks.views.metrics import sealed_iterations
from tasks.views.runs import open_known_run

TABLES = ("rollouts", "iterations")


def query_runs(store: str, sql: str, *, names: Sequence[str]) -> pa.Table:
    """Answer a query about the sealed iterations of these runs, by default of all.

    Its tables are `rollouts`, with a row for each completion and its scores, and `iterations`, with a row for each and
    all metrics of its seal, such as `update_entropy` for `update/entropy`. What a run does not have is null there.
    Raises BadInput where the query is none that DuckDB answers, or no run has a sealed iteration.
    """
    runs = [open_known_run(store, name) for name in names or list_runs(store)]
    rows = [row for run in runs for row in _rows(run)]
    if not rows:
        where = ", ".join(map(repr, names)) or f"the runs of {open_store(store).uri}"
        raise BadInput(f"{where}: expected a sealed iteration to query, found none")
    with guarded_directory("rheostat-query-") as scratch, duckdb.connect() as database:
        database.execute("SET temp_directory = ?", [str(scratch / "spilled")])
        files = [str(path) for run in runs for path in _files(run, scratch)]
        database.read_parquet(files, union_by_name=True).create_view("rollouts")
        columns = dict.fromkeys(name for row in rows for name in row)
        database.register("iterations", pa.table({name: [row.get(name) for row in rows] for name in columns}))
        try:
            answer = database.sql(sql)
            return pa.table({}) if answer is None else answer.to_arrow_table()
        except duckdb.Error as error:
            raise BadInput(f"{_told(error)} (tables: {', '.join(TABLES)})") from error


def _rows(run: Run) -> Iterator[dict[str, object]]:
    """What the seals of a run say."""
    for number, sealed in enumerate(sealed_iterations(run), start=1):
        metrics = {name.replace("/", "_"): value for name, value in sealed.metrics.items()}
        seconds = {f"seconds_{name}": value for name, value in sealed.provenance.seconds.items()}
        yield {"run": run.name, "iteration": number, "policy": sealed.detail["policy"], **metrics, **seconds}


def _files(run: Run, scratch: Path) -> Iterator[Path]:
    """Parquet files of this machine with a run's rollouts, as far as they were not deleted."""
    numbers = range(1, len(sealed_iterations(run)) + 1)
    gone = without_rollouts(run, numbers)
    for number in numbers:
        key = iteration_key(number)
        if run.store.exists(export_file(key)):
            yield run.store.local(export_file(key))
        elif number not in gone:
            path = scratch / f"{run.name}-{key}.parquet"
            write_export(exported(run, number), path, key=key)
            yield path


def _told(error: duckdb.Error) -> str:
    """What DuckDB says, with a mark where in the query it is, in one line."""
    return " ".join(str(error).replace("^", "").split())
