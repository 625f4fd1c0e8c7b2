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
from rheostat.flows.cli.train import describe_results, open_job, show_progress
from rheostat.infra.terminal import Json, write

if TYPE_CHECKING:
    from rheostat.tasks.forks.creation import ForkPlan

Point = Annotated[
    str,
    Parameter(
        name="RUN@N",
        help="parent run and last shared iteration, such as demo@12; demo@0 begins with the initial policy",
    ),
]
ForkName = Annotated[str, Parameter(name="NAME", help="name of the new run")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ForkOptions:
    """Options that control where the settings of a fork come from, and what is done."""

    config: Annotated[
        Path | None,
        Parameter(show_default="the stored configuration of the run", help="configuration file to use instead"),
    ] = None
    accept_change: Annotated[
        bool, Parameter(help="continue an existing fork even if reward code or library versions have changed")
    ] = False
    dry_run: Annotated[
        bool, Parameter(help="check everything and print what would be shared, without writing anything")
    ] = False


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
    from rheostat.flows.cli.live import show_checks
    from rheostat.tasks.forks.creation import create_fork, request_fork
    from rheostat.tasks.run.preflight import preflight

    planned = request_fork(store, point, name, overrides=overrides, job=options.config)
    if options.dry_run:
        with show_checks(as_json=as_json):
            asyncio.run(preflight(planned.config))
        write(planned.plan.model_dump_json(indent=2) if as_json else "\n".join(planned.plan.lines()))
        return
    if not as_json and not display.quiet:
        write("\n".join(planned.plan.lines()))
    with (
        show_progress(planned.config, display, as_json=as_json),
        open_job(
            planned.config, "rheostat.flows.train", accept_change=options.accept_change, port=display.port
        ) as config,
    ):
        from rheostat.flows.train import train as train_flow

        create_fork(planned)
        summary = run_flow(train_flow(config, accept_change=options.accept_change))
    write(
        summary.model_dump_json(indent=2)
        if as_json
        else f"{describe_results(summary, planned.config)}\n{_next_steps(planned.plan, store)}"
    )


def _next_steps(plan: "ForkPlan", store: str) -> str:
    place = f" --store {store}" if store != DEFAULT_STORE else ""
    return format_next_steps({"compare both runs": f"rheostat compare {plan.parent} {plan.run}{place}"})
