"""Command that finds out which difference between two runs made one of them worse."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from rheostat.flows.cli.bisect_step import VERBOSITY
from rheostat.flows.cli.fork import check_and_print
from rheostat.flows.cli.options import (
    DEFAULT_DISPLAY,
    DEFAULT_STORE,
    Display,
    Store,
    format_next_steps,
    log_progress,
)
from rheostat.flows.cli.prefect_api import prefect_api, run_flow
from rheostat.flows.cli.train import AcceptChange, DryRun
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, parse_whole_number, write

GoodRun = Annotated[
    str, Parameter(name="GOOD", help="better run, or a registry: the run of the champion from which BAD started")
]
BadRun = Annotated[str, Parameter(name="BAD", help="worse run")]
BisectName = Annotated[str, Parameter(name="NAME", help="prefix of the names of the new forks and evaluation runs")]
Harmless = Annotated[
    str,
    Parameter(
        name="KEY=VALUE",
        help="settings that do not affect the training, such as pools.workers=4, or settings of the evaluation, such "
        "as evaluation.problems=500",
    ),
]
CodeFolder = Annotated[Path | None, Parameter(metavar="FOLDER", show_default="the folder of the run's job")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class BisectOptions:
    """Options that control where code is found, how data is divided, and what a bisection may cost."""

    good_code: Annotated[CodeFolder, Parameter(help="folder with the code of GOOD, such as its rewards")] = None
    bad_code: Annotated[CodeFolder, Parameter(help="folder with the code of BAD, such as its rewards")] = None
    good_python: Annotated[
        Path | None,
        Parameter(
            metavar="PATH",
            show_default="libraries are not tested",
            help="Python interpreter of an environment with the libraries of GOOD and this version of Rheostat",
        ),
    ] = None
    row_ranges: Annotated[
        int,
        Parameter(
            converter=parse_whole_number,
            metavar="N",
            help="approximate number of ranges into which the training prompts that GOOD does not have are divided",
        ),
    ] = 8
    max_forks: Annotated[
        int | None,
        Parameter(
            converter=parse_whole_number, metavar="N", show_default="no limit", help="maximum number of forks to train"
        ),
    ] = None
    max_hours: Annotated[
        float | None,
        Parameter(metavar="HOURS", show_default="no limit", help="maximum total time of the forks' iterations"),
    ] = None
    accept_change: AcceptChange = False
    dry_run: DryRun = False


DEFAULT_OPTIONS = BisectOptions()


def bisect(
    good: GoodRun,
    bad: BadRun,
    name: BisectName,
    /,
    *overrides: Harmless,
    options: BisectOptions = DEFAULT_OPTIONS,
    store: Store = DEFAULT_STORE,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Find out which difference between two runs made one of them worse, by training forks."""
    from rheostat.tasks.forks.bisection import BisectRequest, plan_bisection

    if options.row_ranges < 1:
        raise BadInput(f"--row-ranges must be at least 1, found {options.row_ranges}.")
    if options.max_forks is not None and options.max_forks < 0:
        raise BadInput(f"--max-forks must not be negative, found {options.max_forks}.")
    if options.max_hours is not None and options.max_hours < 0:
        raise BadInput(f"--max-hours must not be negative, found {options.max_hours:g}.")
    request = BisectRequest(
        good=good,
        bad=bad,
        name=name,
        store=store,
        overrides=overrides,
        good_code=options.good_code,
        bad_code=options.bad_code,
        good_python=options.good_python,
        num_row_ranges=options.row_ranges,
        accept_change=options.accept_change,
    )
    plan, config = plan_bisection(request)
    if options.dry_run:
        check_and_print(config, plan, as_json=as_json)
        return
    if not as_json and not display.quiet:
        write("\n".join(plan.lines()))
    log_progress(quiet=as_json, verbosity=display.verbosity)
    os.environ[VERBOSITY] = display.verbosity
    with prefect_api("rheostat.flows.bisect", port=display.port):
        from rheostat.flows.bisect import bisect as bisect_flow

        result = run_flow(bisect_flow(request, options.max_forks, options.max_hours))
    if as_json:
        write(json.dumps({**result.model_dump(mode="json"), "conclusion": result.conclusion()}, indent=2))
        return
    steps = ""
    if result.confirmation is not None:
        place = f" --store {store}" if store != DEFAULT_STORE else ""
        runs = f"{result.good} {bad} {result.confirmation.run}"
        steps = "\n" + format_next_steps({"compare the runs": f"rheostat compare {runs}{place}"})
    write(f"\n{result.text()}{steps}")
