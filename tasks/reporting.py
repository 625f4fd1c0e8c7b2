"""What people see of a run: a line per iteration, Prefect artifacts, the plot and the summary at the end.

Of training on data alone: losses, held-out pairs, held-out accuracy.
"""

import asyncio
import base64
import io
import logging
import re
import string
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from prefect import get_client
from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact, acreate_table_artifact
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.exceptions import ObjectNotFound

from infra.config import Settings
from infra.costs import Cost, total
from infra.errors import Damaged
from infra.store.manifests import Manifest
from models.records.versions import directory_of, policy_of
from models.records.work import ExcerptWork, ScoredShard
from models.rollouts.preview import PICTURED, Excerpts, RolloutPreview
from tasks.preparation import losses_of
from tasks.run.iteration import Iteration
from tasks.run.keys import StageKey, artifact_key, iteration_key, iterations_among
from tasks.run.session import Session
from tasks.run.stages import stage
from tasks.views.metrics import (
    Accuracy,
    IterationReport,
    evaluations_of,
    iteration_table,
    newest_reports,
    reports_of,
    run_costs,
)
from tasks.views.plots import learning_curve, loss_curves

logger = logging.getLogger(__name__)

PAGES_SECONDS = 5.0  # between two renewals, which the driver and the server pay for
LAST_PAGE_SECONDS = 2.0  # for the renewal as a run ends, whose API may be what ended it
TABLE_ROWS = 50  # of the iterations table while a run goes on; the last one has all
LINE_ROWS = 5  # whose mean time says how long the rest will take
SAMPLE_ROWS = 12  # of the table of rollouts, one completion per prompt
SAMPLE_CHARACTERS = 2000  # of each text in it


class RunSummary(Settings):
    """A finished run."""

    run: str
    """Name."""
    path: str
    """Where it lies."""
    iterations: int
    """Sealed iterations."""
    before: Accuracy
    """Held-out accuracy of the initial policy."""
    after: Accuracy
    """Held-out accuracy of the last policy."""
    policy: str
    """Directory of the last policy, or of its adapter."""
    base: str | None
    """Directory of the weights to which the adapter is added; none where the policy's are its own."""
    digest: str
    """Proves which policy it is."""
    plot: str
    """PNG of the learning curve."""
    cost: Cost = Cost()
    """What its iterations and evaluations took."""


def resume_point(session: Session) -> tuple[range, range]:
    """Numbers of the iterations that were learnt from and may not be closed yet, and of those to go through.

    The last sealed one is among the former: what comes after its seal may have been cut short.
    """
    run, total = session.run, session.settings.iterations
    sealed = [number for number in iterations_among(run.folders()) if run.has(_seal_key(number))]
    if sealed != list(range(1, len(sealed) + 1)):
        raise Damaged(f"run {run.name!r}: sealed iterations are not 1 to {len(sealed)}, a seal is missing")
    learnt = len(sealed)
    while learnt < total and run.has(StageKey.policy(learnt + 1)):
        learnt += 1
    if learnt:
        logger.info("run %s: %d of %d iterations are in the store", run.name, min(learnt, total), total)
    return range(max(1, len(sealed)), min(learnt, total) + 1), range(learnt + 1, total + 1)


async def report_iteration(session: Session, number: int) -> None:
    """Log the iteration's line, from the newest seals alone; what pages show is renewed every few seconds."""
    total = session.settings.iterations
    reports = _newest(session, number, most=LINE_ROWS)
    recent = [each.seconds["total"] for each in reports]
    line = reports[-1].line(total, sum(recent) / len(recent) * (total - number))
    logger.info("%s", line)
    said = reports[-2].warnings if len(reports) > 1 else {}
    for metric, warning in reports[-1].warnings.items():
        if metric not in said:
            logger.warning("iteration %d: %s", number, warning)
    session.pages.newest = number, line
    if time.monotonic() - session.pages.renewed >= PAGES_SECONDS:
        await show_progress(session)


async def show_progress(session: Session) -> None:
    """Renew the run's progress and table artifacts, if an iteration was reported since they were last."""
    pages, key = session.pages, artifact_key(session.run.name)
    if pages.newest is None:
        return
    number, line = pages.newest
    pages.newest, pages.renewed = None, time.monotonic()
    progress = 100 * number / session.settings.iterations
    await acreate_progress_artifact(progress=progress, key=f"{key}-progress", description=line)
    table = iteration_table(_newest(session, number, most=TABLE_ROWS))
    await acreate_table_artifact(table, key=f"{key}-iterations", description=f"Run {session.run.name}")


@asynccontextmanager
async def showing_progress(session: Session) -> AsyncIterator[None]:
    """Have pages show the last iteration that was reported, however this ends; an API that is gone hinders nothing."""
    try:
        yield
    finally:
        try:
            async with asyncio.timeout(LAST_PAGE_SECONDS):
                await show_progress(session)
        except Exception as error:  # why the run ends matters more
            logger.warning("the pages of the last iterations were not renewed: %r", error)


@stage("report")
async def report_run(session: Session) -> RunSummary:
    """Draw the learning curve and publish the summary, the full table and some rollouts."""
    run, reports, evaluations = session.run, _reports(session), evaluations_of(session.run)
    last = policy_of(run.require(StageKey.policy(len(reports))))
    scored = [(r.iteration, r.accuracy, r.reward) for r in reports if r.accuracy is not None and r.reward is not None]
    png = learning_curve(run.name, scored, evaluations)
    plot_key = f"report/learning-curve-{len(reports):04d}.png"
    run.store.put(plot_key, png)
    summary = RunSummary(
        run=run.name,
        path=_path(session),
        iterations=len(reports),
        before=evaluations[0],
        after=evaluations[-1],
        policy=directory_of(run, last.adapter or last.weights),
        base=directory_of(run, last.weights) if last.adapter else None,
        digest=last.digest,
        plot=run.store.locate(plot_key),
        cost=total(run_costs(run).values()),
    )
    excerpts = await _excerpts(session, Iteration(run, len(reports))) if reports else Excerpts(())
    key = artifact_key(run.name)
    await acreate_table_artifact(iteration_table(reports), key=f"{key}-iterations", description=f"Run {run.name}")
    await acreate_table_artifact(
        rollout_table(excerpts.samples), key=f"{key}-rollouts", description=f"Rollouts of iteration {len(reports)}"
    )
    await acreate_markdown_artifact(
        summary_page(summary, png, excerpts), key=f"{key}-summary", description=f"Summary of run {run.name}"
    )
    return summary


async def delete_samples(name: str) -> None:
    """Delete what Prefect shows of a run with completions in it: the table of rollouts, and the summary."""
    key = artifact_key(name)
    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[f"{key}-rollouts", f"{key}-summary"]))
    async with get_client() as client:
        while found := await client.read_artifacts(artifact_filter=wanted):
            for artifact in found:
                with suppress(ObjectNotFound):  # somebody else deletes them, too
                    await client.delete_artifact(artifact.id)


def _seal_key(number: int) -> StageKey:
    return StageKey.of(iteration_key(number), "seal")


def _newest(session: Session, number: int, *, most: int) -> list[IterationReport]:
    return newest_reports(session.run, number, most=most, term=session.settings.scoring.terms[0])


def _reports(session: Session) -> list[IterationReport]:
    term = session.settings.scoring.terms[0]
    return reports_of(session.run, term=term)


async def _excerpts(session: Session, iteration: Iteration) -> Excerpts:
    """The first completion of each of some prompts, shortened by a worker: this process holds no payload."""
    shards: list[ScoredShard] = []
    for rollouts, scores in zip(iteration.stage("rollout"), iteration.stage("scoring"), strict=True):
        if sum(shard.rollouts.rows for shard in shards) < SAMPLE_ROWS * session.settings.rollout.group_size:
            shards.append(ScoredShard(rollouts=rollouts.shards[0], scores=scores.shards[0]))
    work = ExcerptWork(
        iteration=iteration.number,
        shards=tuple(shards),
        prompts=SAMPLE_ROWS,
        characters=SAMPLE_CHARACTERS,
        media=iteration.media,
    )
    done = await session.ask("scoring", "excerpts", work, returns=Excerpts)
    return done.result


_PUNCTUATION = re.compile(f"[{re.escape(string.punctuation)}]")  # all that Markdown is made of, and may be escaped

_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def escape_markdown(text: str) -> str:
    r"""Quote a text for Prefect's pages, which render Markdown and HTML in cells of tables too.

    A completion is shown as it was written: it opens no tag, picture or link, and the browser fetches nothing.

    >>> print(escape_markdown("![x](http://a) <b>"))
    \!\[x\]\(http\:\/\/a\) &lt;b&gt;
    """
    return _PUNCTUATION.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), text)


def rollout_table(samples: Sequence[RolloutPreview]) -> list[dict[str, object]]:
    """Show completions with their rewards, their texts escaped; where prompts show images, how these are named."""
    sees = any(sample.images for sample in samples)
    return [
        {
            "reward": sample.reward,
            "prompt": escape_markdown(sample.prompt),
            "completion": escape_markdown(sample.completion),
            "answer": None if sample.answer is None else escape_markdown(sample.answer),
            "tokens": sample.tokens,
            "finish": sample.finish_reason,
            "prompt_id": sample.prompt_id,
            **({"images": ", ".join(image.digest[:16] for image in sample.images)} if sees else {}),
        }
        for sample in samples
    ]


def summary_page(summary: RunSummary, png: bytes, excerpts: Excerpts) -> str:
    """Write a run's summary as Markdown; completions stand in fences that they cannot close, below small images."""
    image = base64.b64encode(png).decode()
    text = io.StringIO()
    text.write(f"# Run {summary.run}\n\n{summary_lines(summary)}\n\n")
    added = f", added to `{summary.base}`" if summary.base else ""
    text.write(f"- policy `{summary.policy}`{added}\n- digest `{summary.digest}`\n- run `{summary.path}`\n\n")
    text.write(f"![learning curve](data:image/png;base64,{image})\n\n")
    for sample in excerpts.samples[:PICTURED]:
        pictured = [each.digest for each in sample.images if each.digest in excerpts.thumbnails]
        text.writelines(f"![image {digest[:16]}]({excerpts.thumbnails[digest]})\n\n" for digest in pictured)
        told = f"{sample.prompt}{sample.completion}"
        fence = "`" * max(3, *(len(found) + 1 for found in re.findall("`+|$", told)))  # longer than any in the text
        text.write(f"{fence}text\n{told}\n{fence}\nreward {sample.reward}\n\n")
    return text.getvalue()


def summary_lines(summary: RunSummary) -> str:
    """Held-out accuracy before and after, with intervals; what that took."""
    before, after = summary.before, summary.after
    return (
        f"held-out accuracy before {before.mean:.3f} (95% interval {before.low:.3f} to {before.high:.3f})"
        f"{before.passed}, after {after.mean:.3f} ({after.low:.3f} to {after.high:.3f}){after.passed}, {after.asked}"
        f"\ntook     {summary.cost.line()}"
    )


class TrainedModel(Settings):
    """A model after its training on data alone."""

    name: str
    """`policy`, or the reward term that it serves."""
    path: str
    """Its directory, in Hugging Face format."""
    digest: str
    """Digest of its weights."""
    losses: list[float]
    """The course of its loss in few points."""
    pair_accuracy: float | None
    """Share of held-out pairs in which it prefers what is preferred; none where it learns from no pairs."""
    pairs: int
    """Held-out pairs."""
    seconds: float
    """Time that the training took."""

    def line(self) -> str:
        """The model as one line."""
        pairs = "" if self.pair_accuracy is None else f", {self.pair_accuracy:.3f} of {self.pairs} held-out pairs right"
        return f"{self.name}: loss {self.losses[0]:.3f} to {self.losses[-1]:.3f} in {self.seconds:.0f} s{pairs}"


class TrainedPolicy(Settings):
    """A policy that was trained on data alone."""

    run: str
    """Name of the run."""
    path: str
    """Where the run lies."""
    policy: TrainedModel
    """The policy."""
    before: Accuracy | None
    """Held-out accuracy before this training; none where no rule says what is right."""
    after: Accuracy | None
    """Held-out accuracy after it."""
    plot: str
    """PNG of the loss."""

    def text(self) -> str:
        """What is told of it at the end."""
        lines = [self.policy.line()]
        if self.before is not None and self.after is not None:
            lines += [f"held-out accuracy before {self.before.line()}", f"                  after  {self.after.line()}"]
        lines += [f"plot     {self.plot}", f"run      {self.path}", f"policy   {self.policy.path}"]
        return "\n".join((*lines, f"digest   {self.policy.digest}"))


class TrainedRewards(Settings):
    """The models behind a run's rewards."""

    run: str
    """Name of the run."""
    path: str
    """Where the run lies."""
    models: tuple[TrainedModel, ...]
    """Those that the run trained."""
    plot: str
    """PNG of their losses."""

    def text(self) -> str:
        """What is told of them at the end."""
        lines = [f"{model.line()}\n         {model.path}" for model in self.models]
        return "\n".join((*lines, f"plot     {self.plot}", f"run      {self.path}"))


@stage("report on {key}")
async def report_policy(session: Session, key: str, before: Accuracy | None, after: Accuracy | None) -> TrainedPolicy:
    """Gather what is to be told of the policy that was committed under a key, and draw its loss."""
    policy = _trained(session, "policy", session.run.require(key))
    plot = _plot(session, key, [policy])
    return TrainedPolicy(
        run=session.run.name, path=_path(session), policy=policy, before=before, after=after, plot=plot
    )


@stage("report on reward models")
async def report_rewards(session: Session) -> TrainedRewards:
    """Gather what is to be told of the reward models that the run trained, and draw their losses."""
    trained = [
        _trained(session, term, session.reward_model(term))
        for term, reward in session.settings.scoring.hosted_rewards.items()
        if reward.is_trained
    ]
    plot = _plot(session, "rewards", trained)
    return TrainedRewards(run=session.run.name, path=_path(session), models=tuple(trained), plot=plot)


def _trained(session: Session, name: str, manifest: Manifest) -> TrainedModel:
    weights = manifest.bundles["weights"]
    return TrainedModel(
        name=name,
        path=directory_of(session.run, weights),
        digest=weights.digest,
        losses=losses_of(manifest),
        pair_accuracy=manifest.metrics.get("heldout_accuracy"),
        pairs=int(manifest.metrics.get("heldout_pairs", 0)),
        seconds=manifest.provenance.seconds["stage"],
    )


def _path(session: Session) -> str:
    return session.run.store.locate("run.json").rpartition("/")[0]


def _plot(session: Session, key: str, models: list[TrainedModel]) -> str:
    store, name = session.run.store, f"report/loss-{key.rpartition('/')[2]}.png"
    store.put(name, loss_curves(f"Run {session.run.name}: {key}", {model.name: model.losses for model in models}))
    return store.locate(name)
