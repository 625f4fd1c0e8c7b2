"""Configuration of agents: programs of the user that use the policy through OpenAI's API. Torch-free."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rheostat.infra.config import Positive
from rheostat.infra.plugins import present_target
from rheostat.infra.processes.episodes import RunEnvironment
from rheostat.infra.store.inputs import Program
from rheostat.infra.variants import ImportString
from rheostat.models.config.episodes import EpisodeSettings, find_single_sequence_conflicts
from rheostat.models.config.job import Job


class AgentEnvironment(EpisodeSettings):
    """Program or function of the user that drives its own episode: it sends requests to the policy through OpenAI's
    API, runs its own tools, and returns a reward."""

    runtime = "rheostat.models.agents.runtime:AgentRuntime"
    checks = {"policy": "rheostat.models.inspection.engines:check_agent"}

    kind: Literal["agent"] = "agent"
    target: ImportString | None = None
    """Function `pkg.mod:function(problem, base_url, api_key)`, which may be async, or a class whose objects can be
    called in this way. Set either this or `command`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the function or of the class. One object of a class serves all episodes of a worker."""
    command: tuple[str, ...] = ()
    """Program and its arguments, which read the address, the key and the problem from environment variables. Set either
    this or `target`."""
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs the function, with its installed packages. The default is the
    interpreter that runs Rheostat."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """Isolation of each agent: "bubblewrap" runs it in a sandbox without network access except to the policy, without
    write access to your files, and unable to see other processes."""
    variables: tuple[str, ...] = ()
    """Names of the environment variables that agents receive, in addition to `PATH`, `HOME` and similar ones."""
    turn_tokens: Positive = 256
    """Maximum tokens of one turn of the policy. A turn and all tokens before it may together be as long as the prompt
    of the problem and `rollout.sampling.max_new_tokens`."""
    history: Literal["append", "per_turn"] = "append"
    """Context of a request that continues an answer: `append` keeps the sampled tokens and appends the new messages.
    `per_turn` renders the whole chat again for each request and trains each turn with its own prompt."""
    agent_seconds: Annotated[float, Field(gt=0)] = 600
    """Time limit in seconds for the agent of an episode. Time in which the policy generates for the agent is not
    counted."""
    memory_mib: Annotated[int, Field(ge=16)] = 2048
    """Memory limit in MiB of all processes of an agent together."""
    max_requests: Positive = 64
    """Maximum number of turns of the policy in an episode. Later requests receive an error."""
    concurrent_requests: Annotated[int, Field(ge=1, le=256)] = 4
    """Maximum number of requests of an agent that are answered at the same time."""
    episode_tokens: Positive = 8192
    """Number of tokens that the policy generates in all turns of an episode. After that, requests receive an error."""
    open_episodes: Annotated[int, Field(ge=1, le=512)] = 64
    """Maximum number of agents that run at the same time in a worker. Fewer are started while the policy generates for
    as many requests as the engine decodes at the same time."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the agent: the function that `target` names, and its options. Without a function, the command
        is not a part of the run's identity."""
        where = f"rollout.environment target {self.target!r}" if self.target else "rollout.environment.command"
        return RunEnvironment(where, target=present_target(self.target) if self.target else "", options=self.options)

    @property
    def sandboxed_by(self) -> str:
        """Configuration key that requires a sandbox, for messages. Empty if no sandbox is required."""
        return "rollout.environment.sandbox" if self.sandbox == "bubblewrap" else ""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which agents cannot be combined."""
        if not job.rollout.engine.interleaves_episodes:
            yield (
                "rollout.environment.kind = 'agent' needs an engine that batches concurrent calls, but "
                f"rollout.engine.kind = {job.rollout.engine.label!r} does not. Use 'transformers' or 'vllm'"
            )
        yield from find_single_sequence_conflicts("rollout.environment.kind = 'agent'", job)
        yield from super().find_conflicts(job)

    @model_validator(mode="after")
    def _require_one_agent(self) -> Self:
        if bool(self.command) == (self.target is not None):
            state = "both are" if self.command else "neither is"
            raise ValueError(f"exactly one of target (a function) and command (a program) must be set, but {state} set")
        if self.command and (self.options or self.python):
            name = "options" if self.options else "python"
            raise ValueError(f"{name} can only be set together with target, but command is set. Remove {name}")
        return self
