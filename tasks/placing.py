"""What the placement of an open run knows, and what its decisions are made from."""

from dataclasses import dataclass, field

from models.config.engines import EngineConfig, PacedEngine
from models.config.judges import ChoiceVerdict, JudgeReward, ScoreVerdict, ServedReward, VerdictConfig
from placement.measurements import Measurements, Prior
from placement.policies.protocol import Policy
from placement.records import Demand, Memory, Pace, Plan
from placement.slots import allot, least_slots
from tasks.settings import RunSettings


@dataclass(slots=True)
class Placing:
    """The placement of a run that is open in this process."""

    policy: Policy
    measurements: Measurements = field(default_factory=Measurements)
    current: Plan | None = None
    """How the slots were last dealt."""
    memory: Memory = field(default_factory=Memory)
    arranged: int = 0
    """How often workers were moved by this process: numbers the journal's entries."""
    began: float = 0.0
    """When the current stage was planned, on the monotonic clock."""


def rollout_demand(settings: RunSettings, measured: Measurements, *, shards: int, completions: int) -> Demand:
    """What generation has to do: shards of so many completions."""
    rollout = settings.rollout
    prior = _prior(rollout.engine, most=rollout.sampling.max_new_tokens)
    return measured.demand("rollout", units=shards, sequences=completions, prior=prior)


def scoring_demand(settings: RunSettings, measured: Measurements, *, shards: int, completions: int) -> Demand:
    """What the reward models have to do, all together; none of them leaves nothing to do."""
    local = settings.scoring.local
    if not local:
        return measured.demand("scoring", units=0, sequences=0)
    slots = {term: reward.slots for term, reward in local.items()}
    answers = sum(reward.votes if isinstance(reward, JudgeReward) else 1 for reward in local.values())
    return measured.demand(
        "scoring",
        units=shards * len(local),
        sequences=max(1, round(completions * answers / len(local))),
        slots=max(1, round(sum(slots.values()) / len(local))),
        least_slots=least_slots(slots, fixed=settings.placement.replicas),
        prior=_served_prior(next(iter(local.values()))),
    )


def workers_of(settings: RunSettings, plan: Plan, turn: str | None) -> dict[str, int]:
    """Workers by role under a plan; where roles take turns, of the one whose turn it is."""
    terms = {term: reward.slots for term, reward in settings.scoring.local.items()}
    workers: dict[str, int] = {}
    if turn in (None, "rollout"):
        workers["rollout"] = plan.rollout
    if turn in (None, "scoring") and terms:
        replicas = allot(plan.scoring, terms, fixed=settings.placement.replicas)
        workers |= {judge_role(term): count for term, count in replicas.items()}
    return workers


def judge_role(term: str) -> str:
    """Role of the workers that serve a reward; also the stage that its manifests are filed under."""
    return f"judge-{term}"


def _served_prior(reward: ServedReward) -> Prior:
    if not isinstance(reward, JudgeReward) or not _writes(reward.verdict):
        return Prior(median_tokens=1, sigma=0, max_tokens=1)
    assert reward.model.kind != "endpoint", "what runs elsewhere takes no slot"
    return _prior(reward.model.engine, most=reward.sampling.max_new_tokens)


def _writes(verdict: VerdictConfig) -> bool:
    """Whether a judge writes its answer token by token, rather than weigh given ones."""
    return isinstance(verdict, ScoreVerdict) or (isinstance(verdict, ChoiceVerdict) and not verdict.constrained)


def _prior(engine: EngineConfig, *, most: int) -> Prior:
    """Before the first measurement: completions take half the room they have."""
    if isinstance(engine, PacedEngine):
        pace = Pace(
            base_seconds=engine.base_seconds,
            per_sequence_seconds=engine.per_sequence_seconds,
            setup_seconds=engine.setup_seconds,
        )
        return Prior(median_tokens=engine.median_tokens, sigma=engine.sigma, max_tokens=most, pace=pace)
    return Prior(median_tokens=max(1.0, most / 2), max_tokens=most)
