"""Configuration of a run: one frozen model composed of the packages' models, read from TOML and `dotted.key=value`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from rheostat.infra.config import RECORDED, PoolsConfig, Settings, encode_recorded, fingerprint_of
from rheostat.infra.errors import BadInput
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.store.inputs import PathNames, place_texts
from rheostat.infra.store.registry import REGISTRIES
from rheostat.infra.trackers.config import TrackerConfig
from rheostat.infra.validation_errors import explain
from rheostat.models.config.alarms import Alarm, AlarmConfig, LengthCollapse, RewardDip, find_alarm_conflicts
from rheostat.models.config.algorithms import AlgorithmConfig, Grpo
from rheostat.models.config.budget import BudgetConfig
from rheostat.models.config.conflicts import (
    JobParts,
    find_conflicts,
    find_image_generation_conflicts,
    find_preference_conflicts,
)
from rheostat.models.config.data import DataConfig
from rheostat.models.config.divergence import ReferenceRule
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import PolicyConfig, ScratchPolicy
from rheostat.models.config.preferences import PreferencesConfig
from rheostat.models.config.promotion import PromotionConfig, SuiteConfig
from rheostat.models.config.references import find_reference_rules
from rheostat.models.config.retriever import RETRIEVERS
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.config.soup import SOUPS, SoupConfig
from rheostat.models.config.training import DpoConfig, EvaluationConfig, RetentionConfig, WarmupConfig
from rheostat.placement.config import AdaptivePlacement, PlacementConfig
from rheostat.tasks.config.documents import apply_overrides, place_overrides, read_document
from rheostat.tasks.config.relations import (
    find_controller_conflicts,
    find_curriculum_conflicts,
    find_name_conflicts,
    find_price_conflicts,
    find_size_conflicts,
    find_slot_conflicts,
    find_timeout_conflicts,
)

_SLICES: Final = "update.sequence_parallel"

LAYOUT: Final = ("pools.update_ranks", "pools.threads", "update.zero_stage", _SLICES)
"""Keys that may change on resuming if the user accepts it. They set how float sums are split over ranks and threads."""

_HOW: Final = (
    *("name", "store", "tags", "retention", "budget", "alarms"),
    *("controllers", "pools", "placement", "tracking", "report", "report_every"),
    *("evaluations", "promotion", "soup", "repeat_overrides"),
)
"""Keys that do not affect results, so a run may continue with other values of these keys."""


class ControllersConfig(Settings):
    """Parallel controllers of the rollout and scoring roles."""

    count: Annotated[int, Field(ge=1, le=256)] = 2
    """Number of controllers per role. Each works on a slice of the iteration's shards."""
    where: Literal["nested", "deployment"] = "nested"
    """Location of controllers. "nested" runs them as sub-flows of this process, and "deployment" as flow runs of the
    deployments `rollout/controller`, `scoring/controller` and so on."""
    iterations_per_flow_run: Annotated[int, Field(ge=1), RenamedFrom("span")] = 50
    """Number of iterations after which a role gets a new flow run, which keeps Prefect's pages readable."""
    silence_seconds: Annotated[float, Field(gt=0)] = 900
    """Maximum seconds that a scoring controller waits without a commit, or that a deployed controller takes to start.
    """


class RunConfig(Settings):
    """Configuration of a run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")] = "run"
    """Name of the run in its store."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Root seed of every random choice of the run."""
    store: str = "./runs"
    """Store that contains runs: a directory, a file:// URI, s3://bucket/prefix or az://container/prefix."""
    iterations: Annotated[int, Field(ge=0, le=1_000_000)] = 24
    """Number of iterations of rollout, scoring and update. A finished run continues if this number is raised."""
    data: DataConfig
    """Training and held-out problems."""
    policy: PolicyConfig = ScratchPolicy()
    """Initial policy."""
    warmup: WarmupConfig | None = None
    """Supervised warm-up (SFT) of the initial policy. Skipped if not set."""
    preferences: PreferencesConfig | None = None
    """Pairs of completions, for reward models that the run trains and for DPO."""
    dpo: DpoConfig | None = None
    """Direct preference optimization (DPO) after the warm-up. Skipped if not set."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation of completions."""
    scoring: ScoringConfig = ScoringConfig()
    """Rewards of completions."""
    algorithm: AlgorithmConfig = Grpo()
    """Algorithm that computes advantages from rewards."""
    update: UpdateConfig = UpdateConfig()
    """Settings of the policy update: loss, optimizer and parallelism."""
    pools: PoolsConfig = PoolsConfig()
    """Worker processes."""
    placement: PlacementConfig = AdaptivePlacement()
    """Assignment of workers to roles."""
    controllers: ControllersConfig = ControllersConfig()
    """Flow controllers."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out evaluation."""
    evaluations: tuple[SuiteConfig, ...] = ()
    """Further suites of held-out problems, on which `rheostat retrain` compares policies."""
    promotion: PromotionConfig | None = None
    """Rules for promoting a policy that `rheostat retrain` trained. If not set, the policy stays in its run."""
    soup: SoupConfig | None = None
    """Settings of `rheostat soup`, which merges policies for several preferences. `train` ignores them."""
    repeat_overrides: Annotated[tuple[tuple[str, ...], ...], RenamedFrom("rehearsal")] = ()
    """Overrides that apply from the second repetition of `rheostat retrain --times` on, one list for each
    repetition."""
    retention: RetentionConfig = RetentionConfig()
    """Retention of the files of policies and rollouts."""
    budget: BudgetConfig = BudgetConfig()
    """Limits on the cost of the run."""
    alarms: tuple[AlarmConfig, ...] = (LengthCollapse(), RewardDip())
    """Alarms, which warn, end the run, or revert it to an earlier policy if a metric is beyond a bound. Every run also
    has built-in warnings. A configured list replaces the default alarms."""
    tracking: tuple[TrackerConfig, ...] = ()
    """Services to which the run's metrics are mirrored. Their keys are read from environment variables."""
    report_every: Annotated[int, Field(ge=0)] = 10
    """Number of iterations between two updates of the plot, summary and rollouts shown in Prefect. They are always
    updated at the last iteration. With 0 they are updated only then."""
    report: bool = True
    """Whether the run ends with an HTML report like `rheostat report`, which takes about 10 seconds on one core."""
    tags: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")], ...] = ()
    """Tags of the run, shown in Prefect. `rheostat gc --tag TAG` does not delete runs with this tag."""

    @field_validator("name")
    @classmethod
    def _name_stays_in_the_store(cls, name: str) -> str:
        if ".." in name:
            raise ValueError(f"the name of a run must not contain '..', found {name!r}. Choose another name.")
        reserved = {REGISTRIES: "registries", SOUPS: "records of soups", RETRIEVERS: "retrievers"}
        if name in reserved:
            raise ValueError(
                f"a run cannot have the name {name!r}, which is the folder of {reserved[name]} in a store. Choose "
                "another name."
            )
        return name

    @model_validator(mode="after")
    def _parts_have_compatible_sizes_and_names(self) -> "RunConfig":
        for reason in (
            *find_size_conflicts(self.evaluation, self.data, self.rollout, self.retention),
            *find_name_conflicts(self.rollout, self.scoring, self.placement),
            *find_curriculum_conflicts(self.rollout, self.data),
            *find_price_conflicts(self.budget, self.scoring),
        ):
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _suites_are_known(self) -> "RunConfig":
        names = [suite.name for suite in self.evaluations]
        if len({*names}) < len(names):
            raise ValueError(
                f"each table of [[evaluations]] needs a different name, found {', '.join(names)}. Rename one."
            )
        if self.promotion is not None:
            heldout = self.evaluation.problems
            reasons = self.promotion.find_conflicts(self.evaluations, self.scoring, heldout=heldout, run=self.name)
            for reason in reasons:
                raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "RunConfig":
        for reason in find_conflicts(self._job()):
            raise ValueError(reason)
        for reason in find_image_generation_conflicts(self.policy, self._job(), warmup=self.warmup, data=self.data):
            raise ValueError(reason)
        for name, heldout in (("evaluation", self.evaluation), *((each.name, each) for each in self.evaluations)):
            for reason in heldout.find_conflicts(self.rollout.denoising):
                raise ValueError(f"{name}: {reason}")
        for reason in find_alarm_conflicts(self.alarms, self._job()):
            raise ValueError(reason)
        if self.soup is not None and self.policy.generates_images:
            raise ValueError(
                f"[soup] merges only policies that generate text, but policy.kind = {self.policy.label!r} generates "
                "pictures. Remove [soup]."
            )
        for reason in self.soup.find_conflicts(self.scoring, self.update, self.data) if self.soup else ():
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _problems_have_a_use(self) -> "RunConfig":
        own = self.rollout.environment
        suites = ((f"evaluations {each.name!r}: data", each.data, each.environment or own) for each in self.evaluations)
        for where, data, environment in (("data", self.data, own), *suites):
            for reason in environment.find_data_conflicts(data, where) if environment else ():
                raise ValueError(reason)
            has_tasks = environment is not None and environment.label == data.label
            if data.is_evaluation_only and not has_tasks and where != "data":
                raise ValueError(
                    f"{where}.kind = {data.label!r} needs an environment that runs its tasks. Set environment.kind = "
                    f"{data.label!r} in the suite, with the same task"
                )
        if self.data.is_evaluation_only and self.iterations > 0:
            raise ValueError(
                f"data.kind = {self.data.label!r} has only held-out problems, so a run cannot train on them. Use it in "
                "[[evaluations]]"
            )
        return self

    def _job(self) -> JobParts:
        return JobParts(
            algorithm=self.algorithm,
            update=self.update,
            rollout=self.rollout,
            scoring=self.scoring,
            pools=self.pools,
            iterations=self.iterations,
        )

    @model_validator(mode="after")
    def _preferences_have_a_use(self) -> "RunConfig":
        reasons = find_preference_conflicts(self.preferences, dpo=self.dpo, data=self.data, scoring=self.scoring)
        for reason in reasons:
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _workers_can_do_all_roles(self) -> "RunConfig":
        for reason in (
            *find_controller_conflicts(self.pools, deployed=self.controllers.where == "deployment"),
            *find_slot_conflicts(self.pools, self.placement, self._reward_slots()),
            *find_timeout_conflicts(self.pools, self.scoring, self.rollout, self.algorithm),
        ):
            raise ValueError(reason)
        return self

    def _reward_slots(self) -> int:
        """Return the minimum number of worker slots that the reward models hosted by this run need."""
        served = self.scoring.hosted_rewards
        return sum(self.placement.replicas.get(term, 1) * reward.slots for term, reward in served.items())

    @property
    def min_slots(self) -> int:
        """Minimum number of worker slots with which the run can continue."""
        if self.pools.workers.min is not None:
            return self.pools.workers.min
        slots = self._reward_slots()
        return max(1, slots if self.placement.can_take_turns else slots + 1)

    @property
    def reference_rule(self) -> ReferenceRule:
        """Rule by which the reference of the KL penalty is reset or averaged. A teacher may be the same average."""
        return next(iter(find_reference_rules(self.update, self.algorithm).values()), ReferenceRule())

    @property
    def revert_alarms(self) -> tuple[Alarm, ...]:
        """Alarms that revert the run to an earlier policy. Results depend on them, but not on the maximum number of
        reverts."""
        return tuple(alarm for alarm in self.alarms if alarm.action == "revert")

    def identity(self, recorded: Mapping[str, JsonValue] | None = None) -> dict[str, JsonValue]:
        """Return the settings that results depend on. A run continues only with the same identity.

        Paths are written as in the recorded configuration, which is passed as `recorded` if the run exists.
        """
        excluded: dict[str, bool | set[str]] = dict.fromkeys(_HOW, True)
        excluded["scoring"] = {"python", "sandbox"}
        # recomputing activations gives the same bits with less memory
        excluded["update"] = {"activation_checkpointing"}
        if self.update.schedule == "constant":
            excluded["iterations"] = True
        names = PathNames(self, recorded)
        identity: dict[str, JsonValue] = self.model_dump(mode="json", exclude=excluded, context=names)
        if self.revert_alarms:
            identity["alarms"] = [each.model_dump(mode="json", exclude={"max_reverts"}) for each in self.revert_alarms]
        identity["pools"] = {"update_ranks": self.pools.update_ranks, "threads": self.pools.threads}
        return self.normalize(identity)

    def normalize(self, recorded: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Return a recorded identity without newer keys that have the value "as before this key existed"."""
        return encode_recorded(recorded, self.model_copy(update={"alarms": self.revert_alarms}))

    def layout(self) -> dict[str, int]:
        """Return the numbers of ranks and threads over which floating-point sums are distributed, by dotted key."""
        pools, update = self.pools, self.update
        numbers = (pools.update_ranks, pools.threads, update.zero_stage, update.sequence_parallel)
        layout = dict(zip(LAYOUT, numbers, strict=True))
        return {key: number for key, number in layout.items() if key != _SLICES or number > 1}

    def with_layout(self, layout: Mapping[str, int]) -> "RunConfig":
        """Return a copy with other numbers of ranks and threads. Keys of the argument are listed in `LAYOUT`."""
        parts = {"pools": self.pools, "update": self.update}
        for key, number in ({_SLICES: 1, **layout} if layout else {}).items():
            part, _, name = key.partition(".")
            parts[part] = parts[part].model_copy(update={name: number})
        return self.model_copy(update=parts)

    def fingerprint(self) -> str:
        """Return a digest of the settings that results depend on, as 16 hexadecimal digits."""
        return fingerprint_of(self.identity())


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and the files that it extends, apply overrides and validate. Raises BadInput if anything is
    wrong."""
    placed_overrides = place_overrides(overrides, Path.cwd(), job=path.parent)
    return override_config(read_document(path, RunConfig), placed_overrides, source=str(path))


def override_config(
    document: Mapping[str, object], overrides: Sequence[str], *, source: str, recorded: bool = False
) -> RunConfig:
    """Apply overrides to a document and validate it. See `parse_config`."""
    return parse_config(apply_overrides(document, overrides, RunConfig), source=source, recorded=recorded)


def parse_config(document: Mapping[str, object], *, source: str, recorded: bool = False) -> RunConfig:
    """Validate a configuration document. Raises BadInput with the key, the expected value and the most similar name.

    If `recorded` is true, the document is from a stored run. Missing newer keys then mean "as before". A stored
    document has no `retention`, so `retention.keep_last` is set to the minimum that `rollout.staleness` needs.
    """
    rollout = document.get("rollout")
    if recorded and isinstance(rollout, dict) and isinstance(stale := rollout.get("staleness"), int) and stale:
        retention = document.get("retention", {})
        if isinstance(retention, dict):
            document = {**document, "retention": {"keep_last": stale + 2, **retention}}
    try:
        return RunConfig.model_validate(document, context=RECORDED if recorded else None)
    except ValidationError as error:
        raise BadInput(f"{source}: {explain(error, RunConfig)}") from None


def validate_again(config: RunConfig, *, source: str) -> RunConfig:
    """Validate a configuration in which parts were replaced. Raises BadInput if the parts are inconsistent."""
    names = PathNames(config)
    document = place_texts(config.model_dump(mode="json", context=names), names.folder)
    assert isinstance(document, dict)
    return parse_config(document, source=source)


def with_rule_rewards_only(config: RunConfig) -> RunConfig:
    """Return the configuration with only its first reward if that reward is a rule, otherwise return it unchanged. Used
    before reward models exist."""
    first = config.scoring.rewards[0]
    if config.scoring.terms[0] in config.scoring.model_rewards or first.scores_parts:
        return config
    scoring = config.scoring.model_copy(update={"rewards": (first,)})
    rollout = config.rollout.model_copy(update={"dynamic": None, "curriculum": None})
    # Controllers in other processes would read the run's original configuration.
    controllers = ControllersConfig(count=config.controllers.count, where="nested")
    return config.model_copy(update={"scoring": scoring, "rollout": rollout, "controllers": controllers})


def require_part(command: str, config: RunConfig) -> None:
    """Raise BadInput if the configuration lacks the part of the job that the command runs."""
    match command:
        case "sft" if config.warmup is None:
            raise BadInput(
                f"Run {config.name!r} has no supervised fine-tuning, because [warmup] is not set. Set [warmup]."
            )
        case "dpo" if config.dpo is None:
            raise BadInput(
                f"Run {config.name!r} has no preference optimization, because [dpo] is not set. Set [dpo] and "
                "[preferences]."
            )
        case "reward-model" if not _trains_rewards(config):
            raise BadInput(
                f"Run {config.name!r} trains no reward model. Set model.kind = 'trained' in a reward of kind 'model' "
                "or 'process_model'."
            )


def _trains_rewards(config: RunConfig) -> bool:
    return any(reward.is_trained for reward in config.scoring.hosted_rewards.values())
