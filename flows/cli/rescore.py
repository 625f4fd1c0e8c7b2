"""Commands that derive new scores or advantages from a run's stored rollouts."""

import json
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, RunName, Scores, Store, log_progress
from rheostat.infra.terminal import Json, table, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rheostat.flows.cli.output import Rows
    from rheostat.infra.config import Settings
    from rheostat.tasks.run.rescorings import DerivedResult

Rewards = Annotated[
    str, Parameter(metavar="TOML", help="new rewards: TOML file with a [scoring] table, or its keys as inline TOML")
]
AlgorithmTable = Annotated[
    str,
    Parameter(
        metavar="TOML",
        help="new algorithm: TOML file with an [algorithm] table, its keys as inline TOML, or only its kind",
    ),
]
PoolOverrides = Annotated[
    str,
    Parameter(
        name="POOLS.KEY=VALUE",
        help="override settings of the workers, such as pools.workers=4 or pools.gpus_per_worker=1",
    ),
]
Iterations = Annotated[
    str | None,
    Parameter(metavar="3-7", show_default="all that are sealed", help="iterations to process, such as 3, 3-7 or 1,3-5"),
]
RescoringName = Annotated[
    str | None, Parameter(name="--as", metavar="NAME", show_default="from the rewards", help="name of the rescoring")
]
RecreditName = Annotated[
    str | None, Parameter(name="--as", metavar="NAME", show_default="from the algorithm", help="name of the recredit")
]


def rescore(
    run: RunName,
    /,
    *overrides: PoolOverrides,
    rewards: Rewards,
    name: RescoringName = None,
    iterations: Iterations = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Score a run's stored rollouts again with other rewards, without generating anything."""
    from rheostat.flows.cli.output import rescored_rows
    from rheostat.flows.cli.requests import request_rescoring, rescore_here
    from rheostat.tasks.run.rescorings import DerivedResult
    from rheostat.tasks.views.runs import rescored_iterations

    log_progress(quiet=as_json)
    request = request_rescoring(store, run, rewards=rewards, name=name, iterations=iterations, overrides=overrides)
    rescore_here(request)
    lines = rescored_iterations(store, run, request.name, request.iterations)
    _show(DerivedResult("rescore", request.name), run, lines, rescored_rows(lines), as_json=as_json)


def recredit(
    run: RunName,
    /,
    *overrides: PoolOverrides,
    algorithm: AlgorithmTable,
    scores: Scores = None,
    name: RecreditName = None,
    iterations: Iterations = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Compute new advantages for a run's stored rollouts, with another algorithm or from other scores."""
    from rheostat.flows.cli.output import recredited_rows
    from rheostat.flows.cli.requests import recredit_here, request_recredit
    from rheostat.tasks.run.rescorings import DerivedResult
    from rheostat.tasks.views.runs import recredited_iterations

    log_progress(quiet=as_json)
    request = request_recredit(
        store, run, algorithm=algorithm, scores=scores, name=name, iterations=iterations, overrides=overrides
    )
    recredit_here(request)
    lines = recredited_iterations(store, run, request.name, request.iterations)
    _show(DerivedResult("recredit", request.name), run, lines, recredited_rows(lines), as_json=as_json)


def _show(derived: "DerivedResult", run: str, lines: "Sequence[Settings]", rows: "Rows", *, as_json: bool) -> None:
    if as_json:
        write(json.dumps({"name": derived.name, "iterations": [line.model_dump() for line in lines]}, indent=2))
    else:
        write(f"\n{table(rows)}\n{derived.label} of run {run}")
