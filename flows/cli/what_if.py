"""Command that trains with other settings on the stored rollouts of a run."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rheostat.flows.cli.fork import JobFile, check_and_print, train_fork
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
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rheostat.tasks.forks.answer import WhatIfAnswer

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

    config: JobFile = None
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
    accept_change: AcceptChange = False
    dry_run: DryRun = False


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
    from rheostat.tasks.forks.creation import create_fork, request_fork
    from rheostat.tasks.forks.replay import check_continuation

    if not 0 < options.bound <= 1:
        raise BadInput(f"--bound must be above 0 and at most 1, found {options.bound:g}.")
    point = run if "@" in run else f"{run}@0"
    planned = request_fork(store, point, name, overrides=overrides, job=options.config, is_what_if=True)
    if options.continues:
        check_continuation(planned.config)
    if options.dry_run:
        check_and_print(planned.config, planned.plan, as_json=as_json)
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
        point, name, *changes = fork
        continued = request_fork(store, point, name, overrides=[*overrides, *changes], job=options.config)
        summary = train_fork(continued, display, accept_change=options.accept_change, as_json=as_json)
        if not as_json:
            write(describe_results(summary, continued.config))
    elif options.continues and not as_json:
        write("All iterations can be trusted, so there is nothing to continue.")
    if as_json:
        document = None if summary is None else summary.model_dump(mode="json")
        write(json.dumps({**answer.model_dump(mode="json"), "continued": document}, indent=2))


def _next_steps(answer: "WhatIfAnswer", fork: "Sequence[str]", store: str) -> str:
    place = f" --store {store}" if store != DEFAULT_STORE else ""
    steps = {"continue with newly generated rollouts": f"rheostat fork {' '.join(fork)}{place}"} if fork else {}
    return format_next_steps(steps | {"compare both runs": f"rheostat compare {answer.parent} {answer.run}{place}"})
