"""Progress and results of a run for its users: log lines, Prefect artifacts, plots and the final summary."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

from prefect import get_client
from prefect.artifacts import (
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
)
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.exceptions import ObjectNotFound

from rheostat.infra.costs import total
from rheostat.infra.errors import Damaged, RheostatError
from rheostat.infra.store.progress import write_goal
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef
from rheostat.models.records.versions import directory_of, policy_of
from rheostat.models.records.work import ExcerptWork, ScoredShard
from rheostat.models.rollouts.preview import Excerpts
from rheostat.tasks.events import emit_of_run
from rheostat.tasks.preparation import FROM_STORE_SUFFIX
from rheostat.tasks.report_link import publish_report
from rheostat.tasks.run.batch import picture_shards_of
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.keys import StageKey, artifact_key, iteration_key, iteration_numbers
from rheostat.tasks.run.open_run import OpenRun
from rheostat.tasks.run.reverts import has_reverted, policy_after
from rheostat.tasks.run.stages import stage
from rheostat.tasks.views.diagnosis import MEMORIZED, summarize_warnings
from rheostat.tasks.views.metrics import (
    IterationReport,
    evaluations_of,
    iteration_table,
    mean_stages,
    newest_reports,
    reports_of,
    run_costs,
)
from rheostat.tasks.views.plots import Curves, draw_in_process, draw_in_thread, learning_curves
from rheostat.tasks.views.summary import (
    RunSummary,
    places_of,
    progress_text,
    rollout_table,
    summary_lines,
    summary_page,
)

logger = logging.getLogger(__name__)

PAGES_SECONDS = 5.0  # between two renewals of the pages, which cost driver and server time
LAST_PAGE_SECONDS = 2.0  # limit for the last renewal, because the API may be the reason why the run ends
LAST_SUMMARY_SECONDS = 4.0  # limit for the last summary: a process that must end has little time left
TABLE_ROWS = 50  # rows of the iterations table during the run; the final table has all
LINE_ROWS = 5  # number of iterations whose mean time predicts the remaining time
SAMPLE_ROWS = 12  # rows of the rollouts table, one completion per prompt
SAMPLE_CHARACTERS = 2000  # characters of each text in the rollouts table

Draw = Callable[[Run, str], Coroutine[object, object, bytes]]
"""Function that plots the learning curves of a run, stores the PNG under a key, and returns its bytes."""


def find_remaining_iterations(open_run: OpenRun) -> tuple[range, range]:
    """Return two ranges: iterations that were trained but may lack a later step, and iterations that are not trained
    yet.

    The first range starts with the last sealed iteration, because the steps after its seal may have been interrupted.
    Raises Damaged if a seal is missing.
    """
    run, total = open_run.run, open_run.settings.iterations
    sealed = [number for number in iteration_numbers(run.folders()) if run.has(_seal_key(number))]
    if sealed != list(range(1, len(sealed) + 1)):
        raise Damaged(
            f"run {run.name!r}: the end record (seal) of an iteration is missing, because the numbers are not 1 to "
            f"{len(sealed)}. Restore the manifests of this iteration from a copy of the run."
        )
    num_trained = len(sealed)
    while num_trained < total and run.has(StageKey.policy(num_trained + 1)):
        num_trained += 1
    write_goal(run.store, total, epoch=run.epoch)
    if num_trained:
        logger.info("run %s: %d of %d iterations are in the store", run.name, min(num_trained, total), total)
    return range(max(1, len(sealed)), min(num_trained, total) + 1), range(num_trained + 1, total + 1)


async def report_iteration(open_run: OpenRun, number: int) -> None:
    """Log one line about an iteration with its new warnings, and send the Prefect event. Only the newest iterations are
    read. Prefect's pages are updated at most every few seconds."""
    total = open_run.settings.iterations
    reports = _newest_reports(open_run, number, limit=LINE_ROWS)
    recent = [each.seconds["total"] for each in reports]
    line, eta = reports[-1].line(total), timedelta(seconds=round(sum(recent) / len(recent) * (total - number)))
    sealed = open_run.run.require(_seal_key(number))
    is_stored = sealed.provenance.epoch < open_run.run.epoch
    logger.info("%s", f"{line}{FROM_STORE_SUFFIX}" if is_stored else line, extra={"eta": eta})
    if not is_stored:
        payload = {"reward": reports[-1].reward, "kl": reports[-1].kl, "seconds": reports[-1].seconds["total"]}
        emit_of_run(open_run.run.name, "iteration.sealed", iteration=number, iterations=total, **payload)
    earlier_warnings = reports[-2].warnings if len(reports) > 1 and not has_reverted(open_run.run, number) else {}
    for metric, warning in reports[-1].warnings.items():
        if metric not in earlier_warnings:
            logger.warning("iteration %d: %s", number, warning)
            if metric in sealed.provenance.alarms and not is_stored:
                emit_of_run(open_run.run.name, "alarm.raised", iteration=number, alarm=metric, told=warning)
    open_run.prefect_pages.pending_line, open_run.prefect_pages.last_reported = (number, f"{line}  eta {eta}"), number
    every = open_run.settings.report_every
    if every and number % every == 0 and number < total:
        open_run.prefect_pages.start_renewal(update_summary(open_run, number, draw=draw_in_process))
    if time.monotonic() - open_run.prefect_pages.last_renewal_time >= PAGES_SECONDS:
        await update_progress_pages(open_run)


async def update_progress_pages(open_run: OpenRun) -> None:
    """Update the run's progress and table artifacts in Prefect if an iteration was reported since the last update."""
    pages, key = open_run.prefect_pages, artifact_key(open_run.run.name)
    if pages.pending_line is None:
        return
    number, line = pages.pending_line
    pages.pending_line, pages.last_renewal_time = None, time.monotonic()
    progress = 100 * number / open_run.settings.iterations
    await acreate_progress_artifact(progress=progress, key=f"{key}-progress", description=line)
    table = iteration_table(_newest_reports(open_run, number, limit=TABLE_ROWS))
    await acreate_table_artifact(table, key=f"{key}-iterations", description=f"Run {open_run.run.name}")


async def update_summary(open_run: OpenRun, number: int, *, draw: Draw, max_seconds: float | None = None) -> None:
    """Update the plot, the summary and some rollouts in Prefect after an iteration.

    Errors are logged and do not stop the run. If workers do not respond within `max_seconds`, the summary has no
    rollouts, because the workers may be the reason why the run ends.
    """
    run, key, excerpts = open_run.run, artifact_key(open_run.run.name), Excerpts(())
    try:
        async with asyncio.TaskGroup() as group:
            plot_task = group.create_task(draw(run, _plot_key(number)))
            text_task = group.create_task(asyncio.to_thread(_describe_progress, open_run, number))
            with suppress(TimeoutError, RheostatError):
                async with asyncio.timeout(max_seconds):
                    excerpts = await _read_excerpts(open_run, Iteration(run, number))
        places = [f"run `{locate_run(open_run)}`"]
        text, warnings = text_task.result()
        page = summary_page(run.name, text, places, warnings=warnings, png=plot_task.result(), excerpts=excerpts)
        if excerpts.samples:
            await _publish_rollouts(key, excerpts, number)
        await acreate_markdown_artifact(page, key=f"{key}-summary", description=f"Run {run.name} in progress")
        open_run.prefect_pages.last_summarized = number
    except Exception as error:
        logger.warning("the summary after iteration %d was not updated: %r", number, error)


def _describe_progress(open_run: OpenRun, number: int) -> tuple[str, list[str]]:
    """Return a text about the newest iterations and evaluations, and a list of warnings. Older iterations are not read,
    so the time does not grow with the length of the run."""
    reports = _newest_reports(open_run, number, limit=TABLE_ROWS)
    text = progress_text(reports, evaluations_of(open_run.run), total=open_run.settings.iterations)
    return text, summarize_warnings([report.warnings for report in reports], first=reports[0].iteration)


@asynccontextmanager
async def keep_pages_updated(open_run: OpenRun) -> AsyncIterator[None]:
    """Run the block, then update Prefect's pages to show the last reported iteration. This also happens if the block
    fails. Errors of Prefect's API are ignored.

    After an error or cancellation a summary is published as well. After success `report_run` publishes it later.
    """
    try:
        yield
    except BaseException:
        await _show_last(open_run)
        await _summarise_last(open_run)
        raise
    await _show_last(open_run)


async def _show_last(open_run: OpenRun) -> None:
    try:
        async with asyncio.timeout(LAST_PAGE_SECONDS):
            await update_progress_pages(open_run)
    except Exception as error:  # the reason why the run ends is more important
        logger.warning("Prefect's pages of the last iterations were not updated: %r", error)


async def _summarise_last(open_run: OpenRun) -> None:
    pages = open_run.prefect_pages
    pages.cancel_renewal()
    if pages.last_reported > pages.last_summarized:
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SUMMARY_SECONDS):
                await update_summary(open_run, pages.last_reported, draw=draw_in_thread, max_seconds=LAST_PAGE_SECONDS)


@stage("report")
async def report_run(open_run: OpenRun) -> RunSummary:
    """Return the final summary of a run, and publish it in Prefect with curves, all iterations and some rollouts."""
    open_run.prefect_pages.cancel_renewal()
    run, reports, evaluations = open_run.run, _all_reports(open_run), evaluations_of(open_run.run)
    last = policy_of(policy_after(run, len(reports)))
    png = learning_curves([Curves(run.name, reports, evaluations)])
    run.store.put(_plot_key(len(reports)), png)
    summary = RunSummary(
        run=run.name,
        path=locate_run(open_run),
        iterations=len(reports),
        before=evaluations[0],
        after=evaluations[-1],
        policy=directory_of(run, last.adapter or last.weights),
        base=directory_of(run, last.weights) if last.adapter else None,
        digest=last.digest,
        plot=run.store.locate(_plot_key(len(reports))),
        cost=total(run_costs(run).values()),
        stages=mean_stages(reports),
        report=await publish_report(open_run) if open_run.settings.report else None,
    )
    if reports and MEMORIZED in reports[-1].warnings:  # measured only now, after the last evaluation
        logger.warning("iteration %d: %s", len(reports), reports[-1].warnings[MEMORIZED])
    excerpts = await _read_excerpts(open_run, Iteration(run, len(reports))) if reports else Excerpts(())
    key, text = artifact_key(run.name), summary_lines(summary)
    warnings = summarize_warnings([report.warnings for report in reports])
    await acreate_table_artifact(iteration_table(reports), key=f"{key}-iterations", description=f"Run {run.name}")
    await _publish_rollouts(key, excerpts, len(reports))
    page = summary_page(run.name, text, places_of(summary), warnings=warnings, png=png, excerpts=excerpts)
    await acreate_markdown_artifact(page, key=f"{key}-summary", description=f"Summary of run {run.name}")
    return summary


async def _publish_rollouts(key: str, excerpts: Excerpts, number: int) -> None:
    title = f"Rollouts of iteration {number}"
    await acreate_table_artifact(rollout_table(excerpts.samples), key=f"{key}-rollouts", description=title)


def _plot_key(number: int) -> str:
    return f"report/learning-curve-{number:04d}.png"


async def delete_published_completions(name: str) -> None:
    """Delete the two Prefect artifacts of a run that contain completions, which are the table of rollouts and the
    summary."""
    key = artifact_key(name)
    artifact_filter = ArtifactFilter(key=ArtifactFilterKey(any_=[f"{key}-rollouts", f"{key}-summary"]))
    async with get_client() as client:
        while artifacts := await client.read_artifacts(artifact_filter=artifact_filter):
            for artifact in artifacts:
                with suppress(ObjectNotFound):  # another process may delete them too
                    await client.delete_artifact(artifact.id)


def _seal_key(number: int) -> StageKey:
    return StageKey.of(iteration_key(number), "seal")


def _newest_reports(open_run: OpenRun, number: int, *, limit: int) -> list[IterationReport]:
    return newest_reports(open_run.run, number, limit=limit, term=open_run.settings.scoring.terms[0])


def _all_reports(open_run: OpenRun) -> list[IterationReport]:
    term = open_run.settings.scoring.terms[0]
    return reports_of(open_run.run, term=term)


async def _read_excerpts(open_run: OpenRun, iteration: Iteration) -> Excerpts:
    """Return the first completion of each of the first prompts, shortened. A worker reads the completions, so that the
    driver's process loads no rollouts."""
    shards, pictures = list[ScoredShard](), list[ShardRef]()
    for rollouts, scores in zip(
        iteration.shard_manifests("rollout"), iteration.shard_manifests("scoring"), strict=True
    ):
        if sum(shard.rollouts.rows for shard in shards) < SAMPLE_ROWS * open_run.settings.rollout.group_size:
            shards.append(ScoredShard(rollouts=rollouts.shards[0], scores=scores.shards[0]))
            pictures += picture_shards_of(rollouts)
    work = ExcerptWork(
        iteration=iteration.number,
        shards=tuple(shards),
        prompts=SAMPLE_ROWS,
        characters=SAMPLE_CHARACTERS,
        media=(*iteration.prompts.shards[1:], *pictures),
    )
    done = await open_run.request("scoring", "excerpts", work, returns=Excerpts)
    return done.result


def locate_run(open_run: OpenRun) -> str:
    """Return the directory or address of a run."""
    return open_run.run.store.locate("run.json").rpartition("/")[0]
