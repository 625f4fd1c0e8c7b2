"""Placement for people: the decisions of a run made again from what they were made from, and a plan before a run."""

from collections.abc import Mapping, Sequence
from statistics import median

from pydantic import JsonValue, TypeAdapter

from flows.cli.output import table
from infra.config import Settings
from infra.errors import BadInput
from placement.config import PlacementConfig
from placement.measurements import Measurements
from placement.policies.build import build_policy
from placement.records import Decision, DrainInputs, PlanInputs
from tasks.config.run import RunConfig
from tasks.placement.demand import rollout_demand, scoring_demand
from tasks.views.runs import open_known_run

POLICY: TypeAdapter[PlacementConfig] = TypeAdapter(PlacementConfig)


class DecisionLine(Settings):
    """One decision of a run."""

    batch: str
    """`it-0003`, `it-0003/wave-2` or `eval-0010`."""
    moment: str
    """`plan` between stages, `drain-0001` inside one."""
    sentence: str
    """What was done and why."""
    predicted_seconds: float
    """Expected time to the end of the stage."""
    unchanged_seconds: float
    """The same without the change."""
    measured_seconds: float | None
    """What the stage took, where it is over and was not resumed."""
    replayed: bool
    """Whether the policy decides the same again from the same inputs."""


def replay_run(store: str, name: str) -> list[DecisionLine]:
    """Make every placement decision of a run again; a run whose roles never competed has none."""
    journal = open_known_run(store, name).journal("placement/")
    lines = []
    for key, entry in journal.items():
        batch, _, moment = key.removeprefix("placement/").rpartition("/")
        if "decision" in entry:
            took = journal.get(f"placement/{batch}/stage", {}).get("seconds")
            lines.append(_line(batch, moment, entry, measured=took if isinstance(took, float) else None))
    return sorted(lines, key=lambda line: (line.batch, line.moment != "plan", line.moment))


def _line(batch: str, moment: str, entry: Mapping[str, JsonValue], *, measured: float | None) -> DecisionLine:
    policy = build_policy(POLICY.validate_python(entry["policy"]))
    decision = Decision.model_validate(entry["decision"])
    if moment.startswith("plan"):
        again = policy.plan(PlanInputs.model_validate(entry["inputs"]))
    else:
        again = policy.drain(DrainInputs.model_validate(entry["inputs"]))
    return DecisionLine(
        batch=batch,
        moment=moment,
        sentence=decision.reason,
        predicted_seconds=decision.predicted_seconds,
        unchanged_seconds=decision.unchanged_seconds,
        measured_seconds=measured if moment.startswith("plan") else None,
        replayed=again.model_copy(update={"reason": decision.reason}) == decision,
    )


def decision_text(lines: Sequence[DecisionLine]) -> str:
    """Decisions for a terminal: figures in columns, then the sentence."""
    rows = table(_figures(lines)).splitlines()
    sentences = ["decision", *(line.sentence for line in lines)]
    return "\n".join(f"{row}  {sentence}" for row, sentence in zip(rows, sentences, strict=True)) if lines else ""


def _figures(lines: Sequence[DecisionLine]) -> list[dict[str, str]]:
    return [
        {
            "batch": line.batch,
            "moment": line.moment,
            "predicted s": f"{line.predicted_seconds:.1f}",
            "unchanged s": f"{line.unchanged_seconds:.1f}",
            "measured s": "-" if line.measured_seconds is None else f"{line.measured_seconds:.1f}",
            "again": "same" if line.replayed else "DIFFERENT",
        }
        for line in lines
    ]


class PlacementPlan(Settings):
    """Which workers a run would begin with."""

    decision: Decision
    """The first decision, from assumptions alone."""
    inputs: PlanInputs
    """The assumptions."""


def first_placement(config: RunConfig) -> PlacementPlan:
    """Decide as the run will before it has measured anything. Raises BadInput where roles do not compete."""
    if not config.scoring.local:
        raise BadInput(
            f"run {config.name!r} has no reward model among scoring.rewards: "
            f"all {config.pools.workers} workers generate, there is nothing to place"
        )
    shards = -(-config.rollout.prompts // config.rollout.shard_prompts)
    completions = config.rollout.shard_prompts * config.rollout.group_size
    nothing = Measurements()
    inputs = PlanInputs(
        workers=config.pools.workers,
        rollout=rollout_demand(config, nothing, shards=shards, completions=completions),
        scoring=scoring_demand(config, nothing, shards=shards, completions=completions),
        resize=nothing.resize(),
    )
    return PlacementPlan(decision=build_policy(config.placement).plan(inputs), inputs=inputs)


def assumption_rows(inputs: PlanInputs) -> list[dict[str, str]]:
    """What a plan is made from, as rows of a terminal's table."""
    return [
        {
            "role": role,
            "units": str(demand.units),
            "sequences": str(demand.units * demand.sequences),
            "median tokens": f"{median(demand.lengths):.0f}",
            "step ms": f"{1e3 * demand.pace.base_seconds:.2f}",
            "per sequence ms": f"{1e3 * demand.pace.per_sequence_seconds:.3f}",
            "slots per worker": str(demand.slots),
            "from": "measurements" if demand.measured else "assumptions",
        }
        for role, demand in (("rollout", inputs.rollout), ("scoring", inputs.scoring))
    ]
