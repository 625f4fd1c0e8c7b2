"""Flow that finds out which difference between two runs made one of them worse, by training forks in which differences
are undone."""

import asyncio
import logging
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

from prefect import flow
from prefect.artifacts import acreate_markdown_artifact
from pydantic import Field

from rheostat.flows.child_process import run_module
from rheostat.flows.evaluation import evaluate
from rheostat.flows.prefect_states import install_state_handling
from rheostat.flows.train import train
from rheostat.infra.errors import BadInput, Quarantined, RunChanged, RunLocked
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run, open_run
from rheostat.tasks.forks.bisection import (
    BAD,
    GOOD,
    Bisection,
    BisectionStep,
    BisectRequest,
    TrialFork,
    evaluation_config,
    fork_side,
    request_bisection,
)
from rheostat.tasks.forks.creation import create_fork
from rheostat.tasks.forks.search import (
    BisectResult,
    Outcome,
    SearchState,
    Trial,
    format_numbers,
    max_trials,
    search_candidates,
)
from rheostat.tasks.preparation import check_and_adapt
from rheostat.tasks.run.keys import artifact_key
from rheostat.tasks.run.preflight import is_run_complete, mark_as_checked
from rheostat.tasks.views.metrics import sealed_iterations

logger = logging.getLogger(__name__)

STEP_MODULE = "rheostat.flows.cli.bisect_step"
"""Module of the processes that train and evaluate forks with different code or libraries."""


@flow(name="bisect", flow_run_name="{request.name}", validate_parameters=True)
async def bisect(
    request: BisectRequest,
    max_forks: Annotated[int, Field(ge=0)] | None = None,
    max_hours: Annotated[float, Field(ge=0)] | None = None,
) -> BisectResult:
    """Find out which difference between two runs made one of them worse: settings, training prompts, code, libraries or
    the number of iterations. Trains forks of the worse run with some differences undone, and halves their number each
    time. If the flow is started again with the same arguments, it continues.

    Args:
        request: Runs to compare, and settings of the bisection.
        max_forks: Maximum number of forks. There is no limit by default.
        max_hours: Maximum total time of the forks' iterations, in hours. There is no limit by default.
    """
    install_state_handling()
    bisection = await asyncio.to_thread(request_bisection, request)
    request = bisection.request
    evaluations = {GOOD: request.good, BAD: request.bad}
    await _run_missing_step(bisection, BisectionStep(request=request, evaluations=evaluations))
    result = await _search(bisection, max_forks=max_forks, max_hours=max_hours)
    page = f"# Bisection {request.name}\n\n```text\n{result.text()}\n```"
    await acreate_markdown_artifact(page, key=f"{artifact_key(request.name)}-bisect", description="Result")
    return result


async def _search(bisection: Bisection, *, max_forks: int | None, max_hours: float | None) -> BisectResult:
    """Train forks until the cause is found or the budget is spent, and return the result."""
    difference = await asyncio.to_thread(bisection.compare, BAD, GOOD)
    trials, state = list[Trial](), SearchState(())
    outcome: Outcome = "not_worse" if difference.lower <= 0 else "nothing_differs"
    if difference.lower > 0 and bisection.candidates:
        search = search_candidates(bisection.candidates)
        state, undone = next(search)
        while True:
            has_budget = partial(_has_budget, bisection, trials, undone, max_forks=max_forks, max_hours=max_hours)
            if not await asyncio.to_thread(has_budget):
                outcome = "budget"
                break
            trials.append(await _train_trial(bisection, len(trials) + 1, undone))
            try:
                state, undone = search.send(trials[-1])
            except StopIteration as end:
                state = end.value
                outcome = "found" if state.confirmed else "not_restored"
                break
    return BisectResult(
        name=bisection.request.name,
        good=bisection.request.good,
        bad=bisection.request.bad,
        outcome=outcome,
        difference=difference,
        candidates=bisection.candidates,
        untested=bisection.untested,
        trials=tuple(trials),
        found=state.confirmed,
        suspected=state.suspected,
    )


async def _train_trial(bisection: Bisection, number: int, undone: tuple[int, ...]) -> Trial:
    """Train and evaluate the fork with this number, in which some candidates are undone, and compare it with the worse
    run. A fork whose settings are not possible, or whose training fails for a reason that would occur again, is a trial
    without a difference."""
    fork = bisection.fork(number, undone)
    numbers, most = format_numbers(undone), max_trials(len(bisection.candidates))
    logger.info("%s undoes the differences %s (at most %d forks are trained)", fork.name, numbers, most)
    try:
        planned = await asyncio.to_thread(fork.plan)
        bisection.check_undone(planned, undone)
        await _train_and_evaluate(bisection, fork, number, undone)
    except (RunLocked, RunChanged):
        raise
    except (BadInput, Quarantined) as error:
        logger.warning("%s is skipped: %s", fork.name, error)
        return Trial(run=fork.name, undone=undone, difference=None, reason=str(error))
    difference = await asyncio.to_thread(bisection.compare, BAD, fork_side(number))
    trial = Trial(run=fork.name, undone=undone, difference=difference)
    verdict = "significantly better" if trial.is_better else "not significantly better"
    logger.info("%s: held-out score %+.3f relative to %s, %s", fork.name, trial.gain, bisection.bad.name, verdict)
    return trial


async def _train_and_evaluate(bisection: Bisection, fork: TrialFork, number: int, undone: tuple[int, ...]) -> None:
    request, folder, python = bisection.request, bisection.code_folder(undone), bisection.python(undone)
    training, evaluations = BisectionStep(request=request, fork=fork), {fork_side(number): fork.name}
    if folder == bisection.code.good and python is None:
        await _run_missing_step(bisection, training.model_copy(update={"evaluations": evaluations}))
    else:
        await _run_missing_step(bisection, training, folder, python)
        await _run_missing_step(bisection, BisectionStep(request=request, evaluations=evaluations))


async def _run_missing_step(
    bisection: Bisection, step: BisectionStep, folder: Path | None = None, python: Path | None = None
) -> None:
    """Run a step if its results are not stored. If this process would import other code of the user, or if the step
    needs another Python interpreter `python`, run it in a separate process, which searches modules in `folder` first
    (default: the folder of the better run)."""
    if await asyncio.to_thread(_is_done, step):
        return
    code = bisection.code
    if not code.are_separate and python is None:
        await run_step(step)
        return
    others = [code.good, code.bad]
    await run_module(STEP_MODULE, step.model_dump_json(), folder=folder or code.good, others=others, python=python)


def _is_done(step: BisectionStep) -> bool:
    if step.fork is not None and not is_run_complete(step.fork.plan().config):
        return False
    return all(is_run_complete(evaluation_config(step.request, *each)) for each in step.evaluations.items())


async def run_step(step: BisectionStep) -> None:
    """Run a step of a bisection in this process: train a fork, and evaluate policies."""
    if step.fork is not None:
        planned = await asyncio.to_thread(step.fork.plan)
        config = await check_and_adapt(planned.config)
        await asyncio.to_thread(create_fork, planned)
        with mark_as_checked():
            await train.with_options(persist_result=False)(config, accept_change=step.fork.accept_change)
    for side, run in step.evaluations.items():
        await evaluate.with_options(persist_result=False)(evaluation_config(step.request, side, run))


def _has_budget(
    bisection: Bisection,
    trials: list[Trial],
    undone: tuple[int, ...],
    *,
    max_forks: int | None,
    max_hours: float | None,
) -> bool:
    """Return whether the budget allows the next fork, in which some candidates are undone. Its duration is estimated
    from the iterations of the worse run."""
    trained = [trial for trial in trials if trial.difference is not None]
    if max_forks is not None and len(trained) >= max_forks:
        return False
    if max_hours is None:
        return True
    mean = fmean(_iteration_seconds(each) for each in sealed_iterations(bisection.bad))
    planned = bisection.fork(0, undone).plan().plan
    spent = sum(_training_seconds(open_run(bisection.request.store, trial.run)) for trial in trained)
    estimate = mean * (planned.iterations - planned.iteration)
    return spent + estimate <= 3600 * max_hours


def _training_seconds(run: Run) -> float:
    """Return the total duration of the iterations that a run has trained itself, in seconds."""
    return sum(_iteration_seconds(each) for each in sealed_iterations(run) if not run.inherits(each.key))


def _iteration_seconds(sealed: Manifest) -> float:
    return sealed.provenance.seconds.get("total", 0.0)
