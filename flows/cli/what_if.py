"""Command that trains with other settings on the stored rollouts of a run."""

import asyncio
import json
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
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rheostat.tasks.forks.answer import WhatIfAnswer
    from rheostat.tasks.views.summary import RunSummary

ReplayedRun = Annotated[
    str,
    Parameter(
        name="RUN",
        help="run whose stored rollouts are used; with RUN@N, the change takes effect after iteration N",
    ),
]
WhatIfName = Annotated[str, Parameter(name="NAME", help="name of the what-if run")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class WhatIfOptions:
    """Options that control where the settings of a what-if run come from, and when it ends."""

    config: Annotated[
        Path | None,
        Parameter(show_default="the stored configuration of the run", help="configuration file to use instead"),
    ] = None
    bound: Annotated[
        float,
        Parameter(help="lowest effective sample size, relative to that of RUN, with which an iteration is trusted"),
    ] = 0.5
    continues: Annotated[
        bool,
        Parameter(
            name="--continue",
            negative=(),
            help="afterwards, fork NAME after its last trusted iteration, and train NAME-continued on own rollouts",
        ),
    ] = False
    accept_change: Annotated[
        bool, Parameter(help="continue an existing run even if reward code or library versions have changed")
    ] = False
    dry_run: Annotated[bool, Parameter(help="check everything and print the plan, without writing anything")] = False


DEFAULT_OPTIONS = WhatIfOptions()


def what_if(
    run: ReplayedRun,
    name: WhatIfName,
    /,
    *overrides: Overrides,
    options: WhatIfOptions = DEFAULT_OPTIONS,
    store: Store = DEFAULT_STORE,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Train with other settings on a run's stored rollouts, and show how far the result can be trusted."""
    from rheostat.flows.cli.live import show_checks
    from rheostat.tasks.forks.creation import create_fork, request_fork
    from rheostat.tasks.forks.replay import check_continuation
    from rheostat.tasks.run.preflight import preflight

    if not 0 < options.bound <= 1:
        raise BadInput(f"--bound must be above 0 and at most 1, found {options.bound:g}.")
    point = run if "@" in run else f"{run}@0"
    planned = request_fork(store, point, name, overrides=overrides, job=options.config, is_what_if=True)
    if options.continues:
        check_continuation(planned.config)
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
            planned.config, "rheostat.flows.what_if", accept_change=options.accept_change, port=display.port
        ) as config,
    ):
        from rheostat.flows.what_if import replay

        create_fork(planned)
        answer = run_flow(replay(config, bound=options.bound, accept_change=options.accept_change))
    fork = answer.fork_arguments(planned.config.iterations)
    if not as_json:
        steps = "" if options.continues else f"\n{_next_steps(answer, fork, store)}"
        write(f"\n{answer.text()}{steps}")
    summary = None
    if options.continues and fork:
        summary = _continue([*fork, *overrides], store, options, display, as_json=as_json)
    elif options.continues and not as_json:
        write("All iterations can be trusted, so there is nothing to continue.")
    if as_json:
        continued = None if summary is None else summary.model_dump(mode="json")
        write(json.dumps({**answer.model_dump(mode="json"), "continued": continued}, indent=2))


def _continue(
    words: "Sequence[str]", store: str, options: WhatIfOptions, display: Display, *, as_json: bool
) -> "RunSummary":
    """Fork the what-if run after the last trusted iteration, train the fork on its own rollouts, and show the result
    unless it is part of a JSON document. `words` are the arguments of the fork."""
    from rheostat.tasks.forks.creation import create_fork, request_fork

    point, name, *overrides = words
    continued = request_fork(store, point, name, overrides=overrides, job=options.config)
    with (
        show_progress(continued.config, display, as_json=as_json),
        open_job(
            continued.config, "rheostat.flows.train", accept_change=options.accept_change, port=display.port
        ) as config,
    ):
        from rheostat.flows.train import train

        create_fork(continued)
        summary = run_flow(train(config, accept_change=options.accept_change))
    if not as_json:
        write(describe_results(summary, continued.config))
    return summary


def _next_steps(answer: "WhatIfAnswer", fork: "Sequence[str]", store: str) -> str:
    place = f" --store {store}" if store != DEFAULT_STORE else ""
    steps = {"continue with newly generated rollouts": f"rheostat fork {' '.join(fork)}{place}"} if fork else {}
    return format_next_steps(steps | {"compare both runs": f"rheostat compare {answer.parent} {answer.run}{place}"})
