"""Configuration of agents: programs that use the policy through OpenAI's API. Torch-free."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from rheostat.infra.config import Positive, Since
from rheostat.infra.environments.find import installed_versions
from rheostat.infra.plugins import present_target, target_folders
from rheostat.infra.processes.agents import RunAgent
from rheostat.infra.processes.child import Interpreter, user_folders, user_interpreter
from rheostat.infra.processes.containers import PYTHON, Container, check_container
from rheostat.infra.processes.episodes import RunEnvironment
from rheostat.infra.store.inputs import Program
from rheostat.infra.variants import ImportString, Variant
from rheostat.models.config.episodes import EpisodeSettings, find_single_sequence_conflicts
from rheostat.models.config.job import Job
from rheostat.models.config.tasksets import PLUGIN, NamedTask, TaskChoice, TasksetChoice, VerifiersPlugin


class AgentSettings(EpisodeSettings, ABC):
    """Fields common to all programs that request the policy's turns: the limits of an episode."""

    runtime_factory = "rheostat.models.agents.runtime:AgentRuntime"
    checks = {"policy": "rheostat.models.inspection.engines:check_agent"}

    needs_tokenizer: ClassVar[bool] = False
    """Whether the program receives the directory of the policy's tokenizer, in the problem's column `tokenizer`."""

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
    """Maximum number of requests of an agent that are answered at the same time. Further requests wait."""
    episode_tokens: Positive = 8192
    """Number of tokens that the policy generates in all turns of an episode. After that, requests receive an error."""
    open_episodes: Annotated[int, Field(ge=1, le=512)] = 64
    """Maximum number of agents that run at the same time in a worker. No further agent starts while the engine's batch
    is full of requests."""

    @property
    @abstractmethod
    def program(self) -> RunAgent:
        """Description of the program for the processes that run it, without environment variables."""

    @abstractmethod
    def find_interpreter(self) -> Interpreter:
        """Return the Python interpreter of the program. Raises BadInput if the interpreter or the sandbox is
        missing."""

    def find_conflicts(self, job: Job) -> Iterator[str]:
        """Yield one message for each setting of the job with which agents cannot be combined."""
        if not job.rollout.engine.interleaves_episodes:
            yield (
                f"rollout.environment.kind = {self.label!r} needs an engine that batches concurrent calls, but "
                f"rollout.engine.kind = {job.rollout.engine.label!r} does not. Use 'transformers' or 'vllm'"
            )
        yield from find_single_sequence_conflicts(f"rollout.environment.kind = {self.label!r}", job)
        yield from super().find_conflicts(job)


class AgentEnvironment(AgentSettings):
    """Program or function of the user that drives its own episode: it sends requests to the policy through OpenAI's
    API, runs its own tools, and returns a reward."""

    kind: Literal["agent"] = "agent"
    target: ImportString | None = None
    """Function `pkg.mod:function(problem, base_url, api_key)`, which may be async, or a class whose objects can be
    called in this way. Set either this or `command`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments of the function or of the class. One object of a class serves all episodes of a worker."""
    command: tuple[str, ...] = ()
    """Program and its arguments. The program finds the address and the key of the policy in `OPENAI_BASE_URL` and
    `OPENAI_API_KEY`, and the paths of the problem and of its result in `RHEOSTAT_PROBLEM` and `RHEOSTAT_RESULT`. Files
    next to the configuration file or in the working directory may be named without their folder. Set either this or
    `target`."""
    python: Program | None = None
    """Python interpreter (3.9 or newer) that runs the function, with its installed packages. The default is the
    interpreter that runs Rheostat."""
    sandbox: Literal["none", "bubblewrap", "podman", "docker"] = "none"
    """Isolation of each agent: "bubblewrap" runs it in a sandbox without network access except to the policy, without
    write access to your files, and unable to see other processes. "podman" and "docker" run it in a container of
    `image` with the same restrictions."""
    image: Annotated[str | None, Since("0.2.0", before=None)] = None
    """Image of the containers. It needs `python3` (3.9 or newer), and must be present on each machine."""
    container_options: Annotated[tuple[str, ...], Since("0.2.0", before=())] = ()
    """Additional options of `podman run` or `docker run`, such as `["--network", "bridge", "--memory", "4g"]`."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the agent: the function that `target` names, and its options. Files of a command are not part
        of the run's identity."""
        where = f"rollout.environment target {self.target!r}" if self.target else "rollout.environment.command"
        return RunEnvironment(where, target=present_target(self.target) if self.target else "", options=self.options)

    @property
    def sandboxed_by(self) -> str:
        """Configuration key that requires bubblewrap, for messages. Empty if it is not required."""
        return "rollout.environment.sandbox" if self.sandbox == "bubblewrap" else ""

    @property
    def container(self) -> Container | None:
        """Container in which each agent runs, or None."""
        if self.sandbox == "podman" or self.sandbox == "docker":
            return Container(self.sandbox, self.image or "", self.container_options)
        return None

    @property
    def program(self) -> RunAgent:
        """Description of the function or command."""
        command = tuple(map(_locate_file, self.command))
        return RunAgent(self.run.where, target=self.run.target, options=self.options, command=command)

    def find_interpreter(self) -> Interpreter:
        """Return the configured Python interpreter, the one of the image, or the one that runs Rheostat."""
        if (container := self.container) is not None:
            check_container(container, where="rollout.environment.sandbox", program="".join(self.command[:1]))
            return Interpreter(PYTHON, user_folders(), (), container=container)
        return user_interpreter(self.python, sandbox=self.sandboxed_by, where="rollout.environment.python")

    @model_validator(mode="after")
    def _require_one_agent(self) -> Self:
        if bool(self.command) == (self.target is not None):
            state = "both are" if self.command else "neither is"
            raise ValueError(f"exactly one of target (a function) and command (a program) must be set, but {state} set")
        if self.command and (self.options or self.python):
            name = "options" if self.options else "python"
            raise ValueError(f"{name} can only be set together with target, but command is set. Remove {name}")
        return self

    @model_validator(mode="after")
    def _require_image(self) -> Self:
        if self.container is None:
            for name in ("image", "container_options"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} can only be set with sandbox = 'podman' or 'docker', but sandbox is {self.sandbox!r}. "
                        f"Set sandbox, or remove {name}"
                    )
        elif not self.image:
            raise ValueError(f"sandbox = {self.sandbox!r} needs an image. Set image, such as image = 'python:3.13'")
        elif self.python:
            raise ValueError(f"sandbox = {self.sandbox!r} uses the python3 of the image. Remove python")
        return self


def _locate_file(word: str) -> str:
    """Return the path of the file if `word` names a file in a folder of users' modules, else `word`."""
    paths = (Path(folder, word) for folder in target_folders()) if Path(word).suffix else ()
    return next((str(path) for path in paths if path.is_file()), word)


class PackageEnvironment(TaskChoice, AgentSettings):
    """Fields common to environments in which a program of another package solves its tasks with the policy and scores
    them."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Import strings of the code that is part of the run's identity. The file of a task is always part of it."""
        return ()

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, JsonValue]:
        """Keyword arguments of the class `Episodes` in the plugin module, in addition to those in `tasks`."""

    @property
    def run(self) -> RunEnvironment:
        """Description of the environment: the modules of its tasks, for the run's identity."""
        return RunEnvironment(f"rollout.environment {self.title}", tools=self.modules)

    @property
    def program(self) -> RunAgent:
        """Description of the object that runs episodes in the Python environment of the package."""
        target = f"rheostat_{self.package}:Episodes"
        return RunAgent(self.run.where, target=target, options={**self.tasks, **self.fields})

    def find_interpreter(self) -> Interpreter:
        """Return the Python interpreter with the package. It searches users' folders for modules first."""
        return Interpreter(str(self.find_python()), (*user_folders(), str(PLUGIN)), ())

    def find_library_versions(self) -> Mapping[str, str]:
        """Return the version of the package."""
        return installed_versions(self.package, self.python)

    def find_data_conflicts(self, data: Variant, where: str) -> Iterator[str]:
        """Yield a message if the problems are other tasks than those of this environment."""
        yield from self.find_differences(data, where)


class VerifiersEnvironment(TasksetChoice, PackageEnvironment):
    """Tasks of a taskset of the package verifiers. A harness solves them with the policy, and the taskset computes the
    rewards."""

    kind: Literal["verifiers"] = "verifiers"
    harness: VerifiersPlugin | None = None
    """Harness of verifiers: the program that uses the policy. The default is the harness of the taskset, or else
    `bash`."""
    runtime: dict[str, JsonValue]
    """Runtime of verifiers in which the harness runs: its `type`, such as `subprocess` or `docker`, and its other
    fields. `subprocess` runs the harness on this machine without isolation."""
    options: dict[str, JsonValue] = {}
    """Other fields of the environment's configuration in verifiers, such as `agent.max_turns` and `agent.timeout`."""

    @field_validator("runtime")
    @classmethod
    def _require_type(cls, runtime: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if not isinstance(runtime.get("type"), str):
            raise ValueError("the key type must be a text, such as runtime = { type = 'subprocess' }")
        return runtime

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules of the taskset and of the harness."""
        return tuple(f"{each.module}:__all__" for each in (self.taskset, self.harness) if each is not None)

    @property
    def fields(self) -> Mapping[str, JsonValue]:
        """Harness, runtime and other fields of the environment in verifiers."""
        harness = None if self.harness is None else self.harness.fields
        return {"harness": harness, "runtime": self.runtime, "options": self.options}


class LmEvalEnvironment(NamedTask, PackageEnvironment):
    """Items of a task of lm-eval, which sends its requests to the policy and scores the answers."""

    package = "lm_eval"
    checks = {"problems": "rheostat.models.inspection.engines:check_likelihoods"}
    needs_tokenizer = True

    kind: Literal["lm_eval"] = "lm_eval"
    parser: str = "none"
    """Parser of tool calls in the policy's turns. Tasks of lm-eval contain no tool calls."""
    metric: str | None = None
    """Name of the task's metric that is the score of an item, such as `acc_norm`. The default is the first metric."""
    filter: str | None = None
    """Name of the task's filter whose answers are scored, such as `strict-match`. The default is the first filter."""
    apply_chat_template: bool = False
    """Whether the policy's chat template renders the prompts."""

    @property
    def fields(self) -> Mapping[str, JsonValue]:
        """Metric, filter and rendering of prompts."""
        return {"metric": self.metric, "filter": self.filter, "apply_chat_template": self.apply_chat_template}


class InspectEnvironment(NamedTask, PackageEnvironment):
    """Samples of a task of Inspect, whose solver uses the policy and whose scorer scores the result."""

    package = "inspect"

    kind: Literal["inspect"] = "inspect"
    scorer: str | None = None
    """Name of the task's scorer whose value is the score of a sample. The default is the first scorer."""

    @property
    def fields(self) -> Mapping[str, JsonValue]:
        """Name of the scorer."""
        return {"scorer": self.scorer}
