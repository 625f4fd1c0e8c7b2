"""Commands about placement: what a run decided, and what one would begin with."""

import json
from typing import Annotated

from cyclopts import Parameter

from flows.cli.options import DEFAULT_STORE, Config, Overrides, RunName, Store
from infra.plugins import find_targets_in
from infra.terminal import Json, table, write

Stages = Annotated[
    bool, Parameter(help="print what every finished batch measured, as JSON for `python -m placement.simulator`")
]


def placement(run: RunName, /, *, stages: Stages = False, store: Store = DEFAULT_STORE, as_json: Json = False) -> int:
    """Show a run's placement decisions, each made again from its inputs."""
    from flows.cli.output import decision_text
    from tasks.views.placement import measured_run, replay_run

    if stages:
        write(measured_run(store, run).model_dump_json(indent=2))
        return 0
    lines = replay_run(store, run)
    if as_json:
        write(json.dumps([line.model_dump() for line in lines], indent=2))
    else:
        nothing = f"run {run}: no decision yet; roles compete for workers only where reward models have slots"
        write(decision_text(lines) or nothing)
    return 0 if all(line.replayed for line in lines) else 1


def plan(config: Config, /, *overrides: Overrides, as_json: Json = False) -> None:
    """Show which workers a run would begin with."""
    from flows.cli.output import assumption_rows
    from tasks.config.run import load_config
    from tasks.views.placement import first_placement

    find_targets_in(config.parent)
    first = first_placement(load_config(config, overrides))
    if as_json:
        write(first.model_dump_json(indent=2))
        return
    write(f"{first.decision.reason}\n")
    write(table(assumption_rows(first.inputs)))
    write("\nNothing is measured yet: lengths and step times are assumed, and replaced after the first iteration.")
