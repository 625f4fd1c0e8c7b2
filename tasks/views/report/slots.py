"""Who worked when, for which role, and what placement decided: a picture of some iterations, read from manifests."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from typing import Final

from infra.config import Settings
from infra.store.manifests import Manifest
from infra.store.runs import Run
from placement.records import Decision
from tasks.run.keys import StageKey, iteration_key
from tasks.views.report.curves import COLORS, HATCHES, INK, STYLE, WIDTH, picture
from tasks.views.report.samples import spread

PANELS: Final = 4
"""Iterations that are drawn."""
BARS: Final = 400
"""Pieces of work in each; those that took longest."""
WORKER: Final = re.compile(r"(?P<role>.+)-(?P<place>\d+)-\d+ pid \d+")


class PlacedDecision(Settings):
    """What placement decided, and when."""

    batch: str
    """`it-0003`, `it-0003/wave-2` or `eval-0010`."""
    moment: str
    """`plan`, or `drain-0001-0002` inside a stage."""
    reason: str
    """What was done and why."""
    predicted_seconds: float
    """Expected time to the end of the stage."""
    unchanged_seconds: float
    """The same without the change."""
    after_seconds: float
    """Since the stage began."""


class WorkPiece(Settings):
    """A piece of work of a worker."""

    key: str
    """Manifest that it made."""
    role: str
    """`rollout`, `judge-style`, `scoring`, `update`."""
    place: str
    """Slot, or worker outside the slots."""
    begin: datetime
    """When it began."""
    seconds: float
    """How long it took."""


class SlotsPicture(Settings):
    """An iteration, drawn."""

    batch: str
    """`it-0003`."""
    svg: str
    """Who worked when."""


def decisions_of(run: Run) -> list[PlacedDecision]:
    """Every decision of a run, in order; none where roles never competed."""
    found = []
    for key, entry in run.journal("placement/").items():
        if "decision" in entry:
            batch, _, moment = key.removeprefix("placement/").rpartition("/")
            decision, inputs = Decision.model_validate(entry["decision"]), entry["inputs"]
            after = inputs.get("elapsed_seconds", 0.0) if isinstance(inputs, dict) else 0.0
            found.append(
                PlacedDecision(
                    batch=batch,
                    moment=moment,
                    reason=decision.reason,
                    predicted_seconds=decision.predicted_seconds,
                    unchanged_seconds=decision.unchanged_seconds,
                    after_seconds=float(str(after)),
                )
            )
    return sorted(found, key=lambda each: (each.batch, not each.moment.startswith("plan"), each.moment))


def slots_of(run: Run, numbers: Sequence[int], decisions: Sequence[PlacedDecision]) -> list[SlotsPicture]:
    """Draw some of these sealed iterations."""
    found = []
    for key in map(iteration_key, spread(numbers, PANELS)):
        made = run.manifests(f"{key}/")
        pieces = sorted(_pieces(made), key=lambda piece: -piece.seconds)[:BARS]
        if pieces:
            own = [each for each in decisions if each.batch.split("/")[0] == key]
            plan = next(each for each in made if StageKey.parse(each.key).stage == "plan")
            found.append(SlotsPicture(batch=key, svg=_drawn(key, pieces, own, _time(plan))))
    return found


def _pieces(made: Sequence[Manifest]) -> Iterator[WorkPiece]:
    for manifest in made:
        told, seconds = WORKER.fullmatch(manifest.provenance.worker), manifest.provenance.seconds.get("worker")
        if told is not None and seconds is not None:
            in_slot = told["role"] == "rollout" or told["role"].startswith("judge-")
            yield WorkPiece(
                key=manifest.key,
                role=told["role"],
                place=f"{'slot' if in_slot else told['role']} {told['place']}",
                begin=datetime.fromtimestamp(_time(manifest).timestamp() - seconds, _time(manifest).tzinfo),
                seconds=seconds,
            )


def _time(manifest: Manifest) -> datetime:
    return datetime.fromisoformat(manifest.provenance.created)


def _drawn(key: str, pieces: Sequence[WorkPiece], decisions: Sequence[PlacedDecision], start: datetime) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    places = sorted({piece.place for piece in pieces}, key=lambda place: (place[:4] != "slot", _natural(place)))
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
        svg = picture(figure, f"Who worked when in {key}")
    for name, title in titles.items():
        svg = svg.replace(f'<g id="{name}">', f'<g id="{name}"><title>{escape(title)}</title>', 1)
    return svg


def _natural(text: str) -> list[str]:
    return [part.zfill(8) if part.isdecimal() else part for part in text.split()]
