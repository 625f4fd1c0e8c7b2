"""Timelines of some iterations in a report: what each worker did when, and the placement decisions (which role uses
which worker slots)."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from typing import Final

from rheostat.infra.config import Settings
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.placement.records import Decision
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.views.report.curves import COLORS, HATCHES, INK, STYLE, WIDTH, picture
from rheostat.tasks.views.report.samples import spread

PANELS: Final = 4
"""Maximum number of iterations that are drawn."""
BARS: Final = 400
"""Maximum number of bars in one timeline. If a worker did more, the longest pieces of work are drawn."""
WORKER: Final = re.compile(r"(?P<role>.+)-(?P<place>\d+)-\d+ pid \d+")


class PlacedDecision(Settings):
    """Placement decision in the timeline of an iteration."""

    batch: str
    """Iteration, later batch of an iteration, or evaluation, for example `it-0003`, `it-0003/wave-2` or `eval-0010`."""
    moment: str
    """Time of the decision: `plan` before the stages of the iteration, or the name of a decision during them, such as
    `drain-0001-0002`."""
    reason: str
    """Sentence for the reader that states the decision and its reason."""
    predicted_seconds: float
    """Predicted time to the end of the stage, in seconds."""
    unchanged_seconds: float
    """Predicted time to the end of the stage without a change of the assignment, in seconds."""
    after_seconds: float
    """Time from the start of the stage to the decision, in seconds."""


class WorkPiece(Settings):
    """Work of one worker in a timeline, drawn as a bar."""

    key: str
    """Key under which the result of the work is stored, for example `it-0003/rollout/0001`."""
    role: str
    """Role of the worker, for example `rollout`, `judge-style`, `scoring` or `update`."""
    place: str
    """Slot of the worker, or name of the worker if it has no slot."""
    begin: datetime
    """Time at which the work started."""
    seconds: float
    """Duration in seconds."""


class SlotsPicture(Settings):
    """Timeline of one iteration."""

    batch: str
    """Key of the iteration, for example `it-0003`."""
    svg: str
    """Picture as an SVG element."""


def decisions_of(run: Run) -> list[PlacedDecision]:
    """Return all placement decisions of a run, in order. The list is empty if only one role used the worker slots."""
    placed = []
    for key, entry in run.journal("placement/").items():
        if "decision" in entry:
            batch, _, moment = key.removeprefix("placement/").rpartition("/")
            decision, inputs = Decision.model_validate(entry["decision"]), entry["inputs"]
            after = inputs.get("elapsed_seconds", 0.0) if isinstance(inputs, dict) else 0.0
            placed.append(
                PlacedDecision(
                    batch=batch,
                    moment=moment,
                    reason=decision.reason,
                    predicted_seconds=decision.predicted_seconds,
                    unchanged_seconds=decision.unchanged_seconds,
                    after_seconds=float(str(after)),
                )
            )
    return sorted(placed, key=lambda each: (each.batch, not each.moment.startswith("plan"), each.moment))


def slots_of(run: Run, numbers: Sequence[int], decisions: Sequence[PlacedDecision]) -> list[SlotsPicture]:
    """Draw timelines of at most `PANELS` of these completed iterations, spread evenly."""
    timelines = []
    for number in spread(numbers, PANELS):
        key = iteration_key(number)
        is_own = not run.inherits(StageKey.of(key, "seal"))  # its shared results were computed at another time
        manifests = [each for each in run.manifests(f"{key}/") if not (is_own and run.inherits(each.key))]
        pieces = sorted(_work_pieces(manifests), key=lambda piece: -piece.seconds)[:BARS]
        if pieces:
            own = [each for each in decisions if each.batch.split("/")[0] == key]
            plans = (_commit_time(each) for each in manifests if StageKey.parse(each.key).stage == "plan")
            start = next(plans, min(piece.begin for piece in pieces))
            timelines.append(SlotsPicture(batch=key, svg=_draw_timeline(key, pieces, own, start)))
    return timelines


def _work_pieces(manifests: Sequence[Manifest]) -> Iterator[WorkPiece]:
    for manifest in manifests:
        worker, seconds = WORKER.fullmatch(manifest.provenance.worker), manifest.provenance.seconds.get("worker")
        if worker is not None and seconds is not None:
            in_slot = worker["role"] == "rollout" or worker["role"].startswith("judge-")
            yield WorkPiece(
                key=manifest.key,
                role=worker["role"],
                place=f"{'slot' if in_slot else worker['role']} {worker['place']}",
                begin=datetime.fromtimestamp(
                    _commit_time(manifest).timestamp() - seconds, _commit_time(manifest).tzinfo
                ),
                seconds=seconds,
            )


def _commit_time(manifest: Manifest) -> datetime:
    return datetime.fromisoformat(manifest.provenance.created)


def _draw_timeline(key: str, pieces: Sequence[WorkPiece], decisions: Sequence[PlacedDecision], start: datetime) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    places = sorted({piece.place for piece in pieces}, key=lambda place: (place[:4] != "slot", _natural_key(place)))
    roles, titles = sorted({piece.role for piece in pieces}), dict[str, str]()
    start = min(start, *(piece.begin for piece in pieces))
    with rc_context(fname=STYLE):
        figure = Figure(figsize=(2.4 * WIDTH / 72, 0.9 + 0.24 * len(places)), layout="constrained")
        axes = figure.subplots()
        for number, piece in enumerate(pieces):
            role, begin = roles.index(piece.role), (piece.begin - start).total_seconds()
            bars = axes.barh(
                places.index(piece.place), piece.seconds, left=begin, height=0.7, linewidth=0.6, edgecolor=INK,
                color=COLORS[role % len(COLORS)], hatch=HATCHES[role % len(HATCHES)],
            )  # fmt: skip
            bars[0].set_gid(f"{key}-bar-{number}")
            titles[f"{key}-bar-{number}"] = f"{piece.key}: {piece.seconds:.2f} s on {piece.place}, from {begin:.2f} s"
        for number, decision in enumerate(decisions):
            line = axes.axvline(decision.after_seconds, color=INK, linewidth=2, linestyle=":")
            line.set_gid(f"{key}-decision-{number}")
            titles[f"{key}-decision-{number}"] = f"{decision.moment} of {decision.batch}: {decision.reason}"
        axes.set_yticks(range(len(places)), places)
        end = max((piece.begin - start).total_seconds() + piece.seconds for piece in pieces)
        axes.set(xlabel="seconds", xlim=(-0.01 * end, 1.02 * end), ylim=(len(places) - 0.4, -0.6))
        handles = [
            Patch(facecolor=COLORS[n % len(COLORS)], hatch=HATCHES[n % len(HATCHES)], edgecolor=INK, label=role)
            for n, role in enumerate(roles)
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(roles), frameon=False)
        svg = picture(figure, f"Timeline of the workers in {key}")
    for name, title in titles.items():
        svg = svg.replace(f'<g id="{name}">', f'<g id="{name}"><title>{escape(title)}</title>', 1)
    return svg


def _natural_key(text: str) -> list[str]:
    return [part.zfill(8) if part.isdecimal() else part for part in text.split()]
