"""Data for the commands that explain placement (the assignment of worker slots to roles): past decisions of a run, the
first decision of a new run, and measured durations."""

from collections.abc import Mapping

from pydantic import JsonValue, TypeAdapter

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import Run
from rheostat.models.config.rewards import ScoringConfig
from rheostat.placement.config import PlacementConfig
from rheostat.placement.measurements import Measurements, Role
from rheostat.placement.policies.build import build_policy
from rheostat.placement.records import Decision, Demand, DrainInputs, MeasuredRun, MeasuredStage, PlanInputs
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.placement.demand import add_observations, rollout_demand, scoring_demand
from rheostat.tasks.run.batch import BatchPlan
from rheostat.tasks.run.keys import reward_model_role
from rheostat.tasks.views.runs import open_known_run

POLICY: TypeAdapter[PlacementConfig] = TypeAdapter(PlacementConfig)


class DecisionLine(Settings):
    """One past placement decision, and whether it can be reproduced from its recorded inputs."""

    batch: str
    """Iteration, later batch of an iteration, or evaluation, for example `it-0003`, `it-0003/wave-2` or `eval-0010`."""
    moment: str
    """Time of the decision: `plan` before the batch, or `drain-0001` while the batch was running."""
    sentence: str
    """Sentence for the user that states the decision and its reason."""
    predicted_seconds: float
    """Predicted time to the end of the stage, in seconds."""
    unchanged_seconds: float
    """Predicted time to the end of the stage without a change of the assignment, in seconds."""
    measured_seconds: float | None
    """Measured duration of the stage in seconds. None if the stage is not finished, was resumed, or the decision was
    inside it."""
    replayed: bool
    """Whether the placement policy makes the same decision again from the recorded inputs."""


def replay_run(store: str, name: str) -> list[DecisionLine]:
    """Repeat every placement decision of a run with its recorded inputs, to show why it was made. The list is empty if
    only one role used the worker slots.

    Raises BadInput if the store has no such run.
    """
    journal = open_known_run(store, name).journal("placement/")
    lines = []
    for key, entry in journal.items():
        batch, _, moment = key.removeprefix("placement/").rpartition("/")
        if "decision" in entry:
            seconds = journal.get(f"placement/{batch}/stage", {}).get("seconds")
            lines.append(
                _replay_decision(batch, moment, entry, measured=seconds if isinstance(seconds, float) else None)
            )
    return sorted(lines, key=lambda line: (line.batch, line.moment != "plan", line.moment))


def _replay_decision(
    batch: str, moment: str, entry: Mapping[str, JsonValue], *, measured: float | None
) -> DecisionLine:
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


class PlacementPlan(Settings):
    """First placement decision of a run that has not started."""

    decision: Decision
    """Number of worker slots for each role, with the reason and the predicted duration."""
    inputs: PlanInputs
    """Assumptions that the decision is based on."""


def first_placement(config: RunConfig) -> PlacementPlan:
    """Return the placement decision that a run makes before it has measured anything.

    Raises BadInput if roles do not compete, because no reward needs a hosted model.
    """
    if not config.scoring.hosted_rewards:
        raise BadInput(
            f"Run {config.name!r} has no reward model in worker slots (scoring.rewards), so all "
            f"{config.pools.workers.max} workers generate completions and no placement is computed."
        )
    shards = -(-config.rollout.prompts // config.rollout.shard_prompts)
    completions = config.rollout.shard_prompts * config.rollout.group_size
    nothing = Measurements()
    inputs = PlanInputs(
        workers=config.pools.workers.max,
        rollout=rollout_demand(config, nothing, shards=shards, completions=completions),
        scoring=scoring_demand(config, nothing, shards=shards, completions=completions),
        resize=nothing.resize(),
    )
    return PlacementPlan(decision=build_policy(config.placement).plan(inputs), inputs=inputs)


def measured_run(store: str, name: str) -> MeasuredRun:
    """Return how long generation and scoring took in each finished batch of a run, in the form in which the placement
    simulator reads it.

    Raises BadInput if no placed batch is finished.
    """
    run = open_known_run(store, name)
    entries = run.journal("placement/it-")
    plans = {key: PlanInputs.model_validate(entry["inputs"]) for key, entry in entries.items() if key.endswith("/plan")}
    done = {key: plan for key, plan in plans.items() if f"{key.removesuffix('plan')}stage" in entries}
    if not done:
        raise BadInput(
            f"Run {name!r} has no finished batch with a placement decision. Wait until the first batch ends."
        )
    stages = tuple(_measure_stage(run, key.removeprefix("placement/"), plan) for key, plan in done.items())
    return MeasuredRun(run=name, workers=next(reversed(plans.values())).workers, stages=stages)


def _measure_stage(run: Run, plan_key: str, plan: PlanInputs) -> MeasuredStage:
    manifest = run.find(plan_key)
    assert manifest is not None, f"{plan_key} of a batch that was placed"
    terms = read_recorded(ScoringConfig, run.record.config["scoring"]).hosted_rewards
    roles: dict[str, Role] = {"rollout": "rollout", **dict.fromkeys(map(reward_model_role, terms), "scoring")}
    alone = add_observations(Measurements(), run, BatchPlan.read(manifest), roles)
    return MeasuredStage(
        rollout=_measured_demand(alone, "rollout", plan.rollout),
        scoring=_measured_demand(alone, "scoring", plan.scoring),
    )


def _measured_demand(measured: Measurements, role: Role, planned: Demand) -> Demand:
    return measured.demand(
        role, units=planned.units, sequences=planned.sequences, units_at_once=planned.units_at_once, slots=planned.slots
    )
