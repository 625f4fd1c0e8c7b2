"""Command that begins a run at an iteration of another run."""

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
from rheostat.flows.cli.train import AcceptChange, describe_results, show_progress, train_here
from rheostat.infra.terminal import Json, write

if TYPE_CHECKING:
    from rheostat.tasks.forking import PlannedFork

Point = Annotated[str, Parameter(name="RUN@N", help="run and its last shared iteration; RUN@0 is its initial policy")]
ForkName = Annotated[str, Parameter(name="NAME", help="name of the new run")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ForkOptions:
    """Options that control where the settings of a fork come from, and what is done."""

    config: Annotated[
        Path | None,
        Parameter(
            show_default="the stored configuration of the run", help="configuration file for the later iterations"
        ),
    ] = None
    accept_change: AcceptChange = False
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
    """Begin a run at an iteration of another run, and train it. Everything before is shared, not copied."""
    from rheostat.tasks.forking import create_fork, request_fork

    request = request_fork(store, point, name, overrides=overrides, job=options.config)
    if options.dry_run:
        write(request.plan.model_dump_json(indent=2) if as_json else "\n".join(request.plan.lines()))
        return
    create_fork(request)
    if not as_json and not display.quiet:
        write("\n".join(request.plan.lines()))
    with show_progress(request.config, display, as_json=as_json):
        summary = train_here(request.config, accept_change=options.accept_change, port=display.port)
    write(
        summary.model_dump_json(indent=2)
        if as_json
        else f"{describe_results(summary, request.config)}\n{_next_steps(request, store)}"
    )


def _next_steps(request: "PlannedFork", store: str) -> str:
    place = f" --store {store}" if store != DEFAULT_STORE else ""
    compared = f"rheostat compare {request.plan.parent} {request.plan.run}{place}"
    return format_next_steps({"compare both runs": compared})
