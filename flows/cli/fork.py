"""Command that begins a run at an iteration of another run."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rheostat.flows.cli.options import (
    DEFAULT_DISPLAY,
    DEFAULT_STORE,
    Display,
    Overrides,
    Store,
    format_next_steps,
)
from rheostat.flows.cli.prefect_api import run_flow
from rheostat.flows.cli.train import AcceptChange, DryRun, describe_results, open_job, show_progress
from rheostat.infra.terminal import Json, write

if TYPE_CHECKING:
    from rheostat.tasks.config.run import RunConfig
    from rheostat.tasks.forks.bisection import BisectionPlan
    from rheostat.tasks.forks.creation import ForkPlan, PlannedFork
    from rheostat.tasks.forks.unlearning import UnlearningPlan
    from rheostat.tasks.views.summary import RunSummary

Point = Annotated[
    str,
    Parameter(
        name="RUN@N",
        help="parent run and last shared iteration, such as demo@12; demo@0 begins with the initial policy",
    ),
]
ForkName = Annotated[str, Parameter(name="NAME", help="name of the new run")]


JobFile = Annotated[
    Path | None,
    Parameter(show_default="the stored configuration of the run", help="configuration file to use instead"),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ForkOptions:
    """Options that control where the settings of a fork come from, and what is done."""

    config: JobFile = None
    accept_change: AcceptChange = False
    dry_run: DryRun = False


DEFAULT_OPTIONS = ForkOptions()


def fork(
    point: Point,
    name: ForkName,
    /,
    *overrides: Overrides,
    options: ForkOptions = DEFAULT_OPTIONS,
    store: Store = DEFAULT_STORE,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Begin a run after iteration N of another run, and train it. Iterations 1 to N are shared, not copied."""
    from rheostat.tasks.forks.creation import request_fork

    planned = request_fork(store, point, name, overrides=overrides, job=options.config)
    if options.dry_run:
        check_and_print(planned.config, planned.plan, as_json=as_json)
        return
    if not as_json and not display.quiet:
        write("\n".join(planned.plan.lines()))
    summary = train_fork(planned, display, accept_change=options.accept_change, as_json=as_json)
    write(
        summary.model_dump_json(indent=2)
        if as_json
        else f"{describe_results(summary, planned.config)}\n{_next_steps(planned.plan, store)}"
    )


def check_and_print(config: "RunConfig", plan: "ForkPlan | UnlearningPlan | BisectionPlan", *, as_json: bool) -> None:
    """Check the inputs of a planned fork, and print the plan without writing anything. Raises BadInput if an input is
    wrong."""
    from rheostat.flows.cli.live import show_checks
    from rheostat.tasks.run.preflight import preflight

    with show_checks(as_json=as_json):
        asyncio.run(preflight(config))
    write(plan.model_dump_json(indent=2) if as_json else "\n".join(plan.lines()))


def train_fork(planned: "PlannedFork", display: Display, *, accept_change: bool, as_json: bool) -> "RunSummary":
    """Create a planned fork unless it exists, train it, and return its summary."""
    from rheostat.tasks.forks.creation import create_fork

    with (
        show_progress(planned.config, display, as_json=as_json),
        open_job(planned.config, "rheostat.flows.train", accept_change=accept_change, port=display.port) as config,
    ):
        from rheostat.flows.train import train as train_flow

        create_fork(planned)
        return run_flow(train_flow(config, accept_change=accept_change))


def _next_steps(plan: "ForkPlan", store: str) -> str:
    place = f" --store {store}" if store != DEFAULT_STORE else ""
    return format_next_steps({"compare both runs": f"rheostat compare {plan.parent} {plan.run}{place}"})
