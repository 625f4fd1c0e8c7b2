"""Configuration common to all environments: the format and the length of the policy's turns. Torch-free."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from rheostat.infra.config import Positive, Since
from rheostat.infra.processes.episodes import RunEnvironment
from rheostat.infra.renamed import RenamedFrom
from rheostat.infra.variants import Variant
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.job import Job
from rheostat.models.config.users import UserModelConfig


class EpisodeSettings(Variant, ABC):
    """Fields common to all environments: the format and the length of the policy's turns."""

    runtime_factory: ClassVar[str] = "rheostat.models.environments.runtime:EnvironmentRuntime"
    """Import path `pkg.mod:name` of a `rheostat.models.environments.runtimes.RuntimeFactory`, which creates the object
    that runs episodes in a rollout worker."""

    parser: str = "auto"
    """Parser of tool calls in the policy's turns: `hermes`, `llama3_json`, `none`, a function `pkg.mod:function`, or
    `auto`, which selects the parser that fits the tokenizer's chat template."""
    turn_tokens: Positive = 256
    """Maximum tokens of one turn of the policy. `rollout.sampling.max_new_tokens` limits all turns and observations
    (replies of the environment) of an episode together. With history "per_turn", `max_new_tokens` applies to each turn
    separately: to the turn plus the tokens by which its prompt is longer than the first prompt."""
    history: Literal["template", "append", "per_turn"] = "template"
    """Handling of chat templates that change earlier turns when messages follow, such as templates that remove the
    reasoning from earlier turns. `template` refuses such templates. `append` keeps the sampled tokens, although the
    template would render them differently. `per_turn` renders the whole chat again before each turn and trains each
    turn with its own prompt."""

    @property
    @abstractmethod
    def run(self) -> RunEnvironment:
        """Description of the environment for the processes that run it: the user code to import, if any, the name of
        the environment in messages, and the chat role of its replies."""

    @property
    def stepped(self) -> "SteppedEnvironment | None":
        """This object if the environment replies to one turn after the other, or None if a program requests the
        turns."""
        return None

    @property
    def process(self) -> "EnvironmentSettings | None":
        """This object if the environment runs in separate processes, else None."""
        return None

    @property
    def dialogue(self) -> "DialogueEnvironment | None":
        """This object if a simulated user replies to the policy's turns, else None."""
        return None

    @property
    def sandboxed_by(self) -> str:
        """Configuration key or environment kind that requires a sandbox, for messages. Empty if no sandbox is
        required."""
        return ""

    @property
    def has_turn_prompts(self) -> bool:
        """Whether the whole chat is rendered again before each turn, so each turn has its own prompt (history
        "per_turn")."""
        return self.history == "per_turn"

    def find_library_versions(self) -> Mapping[str, str]:
        """Return the versions of the libraries in another Python environment that affect episodes."""
        return {}

    def find_data_conflicts(self, data: Variant, where: str) -> Iterator[str]:
        """Yield one message for each reason why this environment cannot use the problems of a data source. `where` is
        the configuration key of the source."""
        yield from ()

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this environment cannot be combined."""
        if self.turn_tokens > job.rollout.sampling.max_new_tokens:
            yield (
                f"rollout.environment.turn_tokens is {self.turn_tokens}, but rollout.sampling.max_new_tokens, which "
                f"must be at least as large, is {job.rollout.sampling.max_new_tokens}. Raise max_new_tokens, or lower "
                "turn_tokens"
            )


class SteppedEnvironment(EpisodeSettings, ABC):
    """Fields common to environments in which the policy and the environment take turns."""

    checks = {"policy": "rheostat.models.inspection.engines:check_turns"}
    responder: ClassVar[str] = "rheostat.models.environments.pool:EnvironmentPool"
    """Import path `pkg.mod:name` of a `rheostat.models.environments.responders.ResponderFactory`, which creates the
    object that computes the environment's replies in a worker."""

    arguments: Annotated[Literal["checked", "unchecked"], Since("0.2.0", before="unchecked")] = "checked"
    """Check of the arguments of tool calls. `checked` compares them with the tool's schema; if an argument is missing,
    unknown or of a wrong type, the policy receives a message that names it, and arguments that are JSON text are
    decoded. `unchecked` passes all arguments to the tool, and an error in the tool fails the episode."""
    max_turns: Positive = 4
    """Maximum number of turns of the policy. The episode ends after the last one."""
    observation_tokens: Annotated[int, Field(ge=16)] = 512
    """Maximum tokens of one observation (reply of the environment). The middle of a longer observation is replaced by a
    mark."""
    batches: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of batches into which the prompts of a shard are divided. With several batches, the policy generates turns
    for one batch while environments reply to another."""
    pace: Annotated[Literal["rounds", "free"], Since("0.2.0", before="rounds")] = "rounds"
    """Order of the turns with the engine `transformers`. `rounds` generates the next turn of all unfinished episodes of
    a batch together, so that shards are bit-reproducible. `free` generates the next turn of an episode as soon as its
    environment has replied, while other episodes wait; shards that are generated again are equal up to rounding. With
    vLLM, the pace is always free."""
    prompts: Literal["chat", "text"] = "chat"
    """Format of prompts and observations (replies of the environment): "chat" formats them by the tokenizer's chat
    template, "text" appends observations to plain text unchanged."""

    @property
    def stepped(self) -> "SteppedEnvironment":
        """This object itself, because the environment replies to one turn after the other."""
        return self

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which this environment cannot be combined."""
        if self.has_turn_prompts:
            if self.prompts == "text":
                yield (
                    "rollout.environment.history = 'per_turn' cannot be combined with prompts = 'text', because only a "
                    "chat template can render earlier turns. Remove history"
                )
            if job.rollout.partial is not None:
                yield (
                    "rollout.environment.history = 'per_turn' cannot be combined with rollout.partial, because a later "
                    "iteration does not have the prompts of earlier turns. Remove one of them"
                )
            yield from find_single_sequence_conflicts("rollout.environment.history = 'per_turn'", job)
        if self.pace == "free":
            yield from _find_pace_conflicts(self, job)
        yield from super().find_conflicts(job)


class EnvironmentSettings(SteppedEnvironment, ABC):
    """Fields common to environments without a simulated user. User code runs in separate processes, which are killed if
    they do not reply in time.

    `implementation` names a `rheostat.models.environments.pool.ProcessStarter`.
    """

    implementation = "rheostat.models.environments.pool:user_process"

    step_seconds: Annotated[float, Field(gt=0)] = 20
    """Time limit in seconds for the environment's reply to a turn. If it is exceeded, the episode has failed and its
    reward is missing."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of environment processes in each worker, and so the number of episodes that receive replies at the same
    time."""

    @property
    def process(self) -> "EnvironmentSettings":
        """This object itself, because the environment runs in separate processes."""
        return self


class DialogueEnvironment(SteppedEnvironment):
    """Dialogue with a simulated user: a model that plays the user and replies to the policy's turns."""

    responder = "rheostat.models.environments.dialogues:Dialogues"

    kind: Literal["dialogue"] = "dialogue"
    model: UserModelConfig
    """Model that plays the user."""
    instructions: str
    """System message of the simulated user. `{prompt}`, `{answer}` and the names of the problem's columns, such as
    `{size}`, are replaced by their values."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=256)
    """Sampling settings for the simulated user's replies. If a reply reaches the token limit, the episode has
    failed."""
    endings: dict[Annotated[str, Field(min_length=1)], float] = {}
    """Texts by which the simulated user ends the dialogue, each with the reward for the episode. The policy does not
    see the reply that contains such a text."""
    final_turn_pattern: Annotated[str | None, RenamedFrom("final")] = None
    """Regular expression for the policy's final turn. When a turn matches it, the episode ends without a reply of the
    simulated user."""
    parser: str = "none"
    """Parser of tool calls in the policy's turns. The default is `none`, because this environment runs no tools."""

    @field_validator("final_turn_pattern")
    @classmethod
    def _require_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
        return pattern

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment, which imports no user code. Its replies have the chat role "user"."""
        return RunEnvironment("rollout.environment kind 'dialogue'", role="user")

    @property
    def dialogue(self) -> "DialogueEnvironment":
        """This object itself, because a simulated user replies to the policy's turns."""
        return self

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which a dialogue cannot be combined. An example is partial
        rollout, because a later iteration does not have the messages of the simulated user."""
        yield from super().find_conflicts(job)
        if job.rollout.partial is not None:
            yield (
                "rollout.environment.kind = 'dialogue' cannot be combined with rollout.partial, because a later "
                "iteration does not have the messages of the simulated user. Remove rollout.partial"
            )
        for reason in self.model.find_conflicts(self.sampling):
            yield f"rollout.environment.sampling: {reason}"


def _find_pace_conflicts(environment: SteppedEnvironment, job: Job) -> Iterator[str]:
    if environment.batches > 1:
        yield (
            f"rollout.environment.batches is {environment.batches}, but pace = 'free' does not divide episodes into "
            "batches. Remove one of them"
        )
    engine = job.rollout.engine
    if not engine.interleaves_episodes:
        yield (
            "rollout.environment.pace = 'free' needs an engine that batches concurrent calls, but rollout.engine.kind "
            f"= {engine.label!r} does not. Remove the key, or use 'transformers' or 'vllm'"
        )


def find_single_sequence_conflicts(where: str, job: Job) -> Iterator[str]:
    """Yield one message for each setting of the job that needs the whole episode in one sequence. `where` names the
    setting that divides episodes into several sequences."""
    if job.algorithm.overlong is not None:
        yield (
            f"{where} cannot be combined with algorithm.overlong, because max_new_tokens does not limit the sum of all "
            "turns. Remove one of them"
        )
    for term, reward in zip(job.scoring.terms, job.scoring.rewards, strict=True):
        if reward.granularity in ("step", "token"):
            yield (
                f"{where} cannot be combined with reward {term!r}, which scores the {reward.granularity}s of a single "
                "sequence. Use a reward that scores turns or episodes"
            )
