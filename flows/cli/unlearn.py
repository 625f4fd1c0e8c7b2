"""Command that trains a run again without some prompts."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from rheostat.flows.cli.fork import check_and_print
from rheostat.flows.cli.options import DEFAULT_DISPLAY, DEFAULT_STORE, Display, Overrides, RunName, Store
from rheostat.flows.cli.prefect_api import prefect_api, run_flow
from rheostat.flows.cli.retention import PromptIds, read_ids
from rheostat.flows.cli.train import AcceptChange, DryRun, open_job, show_progress
from rheostat.infra.terminal import Json, write

NewName = Annotated[str, Parameter(name="NAME", help="name of the new run")]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class UnlearnOptions:
    """Options that control what `rheostat unlearn` does."""

    forget: Annotated[
        bool,
        Parameter(
            negative=(), help="afterwards, remove the prompts from all runs that share rollouts with RUN or NAME"
        ),
    ] = False
    accept_change: AcceptChange = False
    dry_run: DryRun = False


DEFAULT_OPTIONS = UnlearnOptions()


def unlearn(
    run: RunName,
    name: NewName,
    /,
    *overrides: Overrides,
    prompt_ids: PromptIds,
    options: UnlearnOptions = DEFAULT_OPTIONS,
    store: Store = DEFAULT_STORE,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Train a run again without some prompts, from the last stored policy that had not used them."""
    from rheostat.tasks.forks.creation import create_fork
    from rheostat.tasks.forks.unlearning import read_unlearned, request_unlearning

    ids = read_ids(prompt_ids)
    unlearned = read_unlearned(store, name, parent=run, ids=ids, overrides=overrides)
    if unlearned is None:
        planned = request_unlearning(store, run, name, ids, overrides=overrides)
        if options.dry_run:
            check_and_print(planned.fork.config, planned.plan, as_json=as_json)
            return
        if not as_json and not display.quiet:
            write("\n".join(planned.plan.lines()))
        with (
            show_progress(planned.fork.config, display, as_json=as_json),
            open_job(
                planned.fork.config, "rheostat.flows.unlearn", accept_change=options.accept_change, port=display.port
            ) as config,
        ):
            from rheostat.flows.unlearn import train_without_prompts

            create_fork(planned.fork)
            unlearned = run_flow(train_without_prompts(config, sorted(ids), accept_change=options.accept_change))
    if options.forget and not options.dry_run and unlearned.tombstones is None:
        with prefect_api("rheostat.flows.unlearn", port=display.port):
            from rheostat.flows.unlearn import remove_prompts

            unlearned = run_flow(remove_prompts(unlearned, store=store))
    write(unlearned.model_dump_json(indent=2) if as_json else unlearned.text())
