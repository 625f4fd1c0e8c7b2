"""Agents of a rollout worker, which run the episodes of rollout shards with the worker's engine."""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

from transformers import PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.processes.agents import AgentHosts, RunAgent
from rheostat.infra.processes.child import Interpreter
from rheostat.infra.processes.guard import guarded_directory
from rheostat.infra.store.contracts import Objects
from rheostat.models.agents.episodes import AgentEpisodes
from rheostat.models.agents.journal import EpisodeJournal
from rheostat.models.agents.replies import ReplyHead
from rheostat.models.agents.routes import AgentRoutes, read_form
from rheostat.models.agents.sampler import TurnLimits, TurnSampler
from rheostat.models.config.agents import AgentSettings
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.data.problems import Problem
from rheostat.models.engines.protocol import (
    Completion,
    ContinuousEngine,
    Engine,
    Generate,
    InterleavingEngine,
    Request,
    ScoresTokens,
    ScoreTokens,
    StatesPlaces,
)
from rheostat.models.engines.requests import context_of
from rheostat.models.environments.clock import EnvironmentClock
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import RolloutWork
from rheostat.models.rollouts.groups import Group
from rheostat.models.text.calls import build_parser
from rheostat.models.text.turns import TurnFormat

_T = TypeVar("_T")

MODEL: Final = "policy"
"""Name of the policy in the answers to agents."""
PLACES: Final = 256
"""Number of completions that an engine is assumed to decode at the same time if it does not state the number."""


class AgentRuntime:
    """Agents of a rollout worker. The processes from which agents are started are kept between shards."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._opened = ExitStack()
        self._hosts: AgentHosts | None = None
        self._form: tuple[TurnFormat, int | None] | None = None
        self._clock = EnvironmentClock()
        self._names = map(str, count())
        self._journal: EpisodeJournal | None = None
        self.progress = 0
        """Counter that increases while episodes advance: when one ends, and while an agent works within its time
        limit."""

    def load(self, directory: Path, user: ModelVersion, /) -> None:
        """Raise BadInput, because no model plays the user."""
        raise BadInput(
            f"{self._settings.run.where}: a model was loaded for this environment, but only environments with a "
            "simulated user (kind 'dialogue') use a model"
        )

    def run_episodes(
        self, groups: Sequence[Group], engine: Engine, work: RolloutWork, *, directory: Path, store: Objects
    ) -> list[Group]:
        """Run each unfinished completion of the groups as an episode of the agent, to its end or until it is cut.
        `directory` contains the policy's tokenizer, and `store` the journals of shards. Raises BadInput if the agent or
        the engine cannot be used."""
        self._delete_journal()
        journal = EpisodeJournal(store, work, self._settings)
        num_runs = count()
        if self._form is None:
            self._form = read_form(directory), context_of(directory)
        form, context = self._form
        interleaving = _find_interleaving(engine)

        def run(generate: Generate) -> list[Group]:
            if next(num_runs):
                journal.delete()  # the engine had generated with other weights
            guarded = GuardedGenerate(generate, self._clock)
            score: ScoreTokens | None = None
            if isinstance(interleaving, ScoresTokens) and interleaving.can_score_tokens:
                score = guarded.guard_scores(interleaving)
            sampler = TurnSampler(guarded, work.sampling, work.policy.version, score)
            settings, head = self._settings, ReplyHead(MODEL, created=0)
            episodes = AgentEpisodes(
                settings=settings,
                version=work.policy.version,
                partial=work.partial,
                hosts=self._open_hosts(),
                routes=AgentRoutes(sampler, form, head, parser=settings.parser, history=settings.history),
                find_limits=partial(find_limits, settings, work.sampling, context),
                places=interleaving.places if isinstance(interleaving, StatesPlaces) else PLACES,
                names=self._names,
                on_progress=self._advance,
                find_failure=lambda: guarded.failure or journal.failure,
                tokenizer=str(directory.absolute()) if settings.needs_tokenizer else "",
                journal=journal,
            )
            return episodes.complete(groups)

        with self._clock.measure_idle():
            completed = interleaving.run_interleaved(run)
        self._journal = journal
        return completed

    def pop_times(self) -> dict[str, float]:
        """Return the seconds in which no turn was generated since the last call."""
        return self._clock.pop_times()

    def sleep(self) -> None:
        """Do nothing, because agents use no GPU memory of this worker."""

    def close(self) -> None:
        """End all agents and their processes."""
        if self._hosts is not None:
            self._hosts.close()
        self._hosts = None
        self._opened.close()
        self._delete_journal()

    def _delete_journal(self) -> None:
        """Delete the journal of the last shard, which is stored now."""
        if self._journal is not None:
            self._journal.delete()
        self._journal = None

    def _advance(self) -> None:
        self.progress += 1

    def _open_hosts(self) -> AgentHosts:
        if self._hosts is None:
            agent, interpreter = describe_agent(self._settings)
            self._hosts = AgentHosts(agent, interpreter, self._opened.enter_context(guarded_directory("rheostat-")))
        return self._hosts


class GuardedGenerate:
    """Function `generate` for the requests of agents. It measures the time in which no turn is generated, and keeps the
    first error of the engine, with which all episodes end."""

    def __init__(self, generate: Generate, clock: EnvironmentClock) -> None:
        self._generate, self._clock = generate, clock
        self.failure: BaseException | None = None
        """First error that the engine has raised, or None."""

    def __call__(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Generate completions."""
        return self._guard(lambda: self._generate(requests, sampling))

    def guard_scores(self, engine: ScoresTokens) -> ScoreTokens:
        """Return the function `score_tokens` of the engine, with the same measurement and handling of errors."""
        return lambda tokens, top: self._guard(lambda: engine.score_tokens(tokens, top))

    def _guard(self, call: Callable[[], _T]) -> _T:
        try:
            with self._clock.pause_idle():
                return call()
        except CancelledError:  # the episode has ended
            raise
        except BaseException as error:
            self.failure = self.failure or error
            raise


def find_limits(settings: AgentSettings, sampling: SamplingConfig, context: int | None, group: Group) -> TurnLimits:
    """Return the limits on the requests of an episode of a group. `context` is the context length of the policy in
    tokens.

    A turn and all tokens before it may together be as long as the prompt and `sampling.max_new_tokens`, because
    training reserves memory for this length.
    """
    longest = group.num_prompt_tokens + sampling.max_new_tokens
    return TurnLimits(
        turn_tokens=settings.turn_tokens,
        episode_tokens=settings.episode_tokens,
        requests=settings.max_requests,
        concurrent=settings.concurrent_requests,
        context=longest if context is None else min(longest, context),
    )


def describe_agent(settings: AgentSettings) -> tuple[RunAgent, Interpreter]:
    """Return the description of the configured agent and the interpreter of its host processes. Raises BadInput if an
    environment variable, the interpreter, the program or the sandbox is missing."""
    program = settings.program
    for name in settings.variables:
        if name not in os.environ:
            raise BadInput(
                f"rollout.environment.variables: the environment variable {name!r} is not set. Set it before you start "
                "the run, or remove its name"
            )
    interpreter = settings.find_interpreter()
    if program.command and interpreter.container is None and shutil.which(program.command[0]) is None:
        raise BadInput(
            f"{program.where}: there is no program {program.command[0]!r} on the PATH. Install the program, or correct "
            "its name"
        )
    variables = {name: os.environ[name] for name in settings.variables}
    agent = replace(program, variables=variables, memory_bytes=settings.memory_mib << 20)
    return agent, interpreter


def check_agent(settings: AgentSettings, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> None:
    """Raise BadInput if the agent cannot be imported, if tool calls of the policy cannot be parsed, or if a problem has
    images."""
    for problem in problems:
        if problem.images:
            raise BadInput(
                f"{problem.source}: the problem has {format_count(len(problem.images), 'image')}, but "
                f"rollout.environment.kind = {settings.label!r} supports text only. Use problems without images."
            )
    build_parser(settings.parser, tokenizer, tools=())
    agent, interpreter = describe_agent(settings)
    with guarded_directory("rheostat-") as home:
        hosts = AgentHosts(agent, interpreter, home)
        try:
            hosts.check()
        finally:
            hosts.close()


def _find_interleaving(engine: Engine) -> InterleavingEngine:
    """Return an engine that batches concurrent calls. Raises BadInput if the engine cannot batch them."""
    if isinstance(engine, InterleavingEngine):
        return engine
    if isinstance(engine, ContinuousEngine):
        return engine.batch_continuously()
    raise BadInput(
        f"agents (rollout.environment.kind) need an engine that batches concurrent calls, but {engine.producer()} has "
        "neither the method `run_interleaved` nor `batch_continuously`. Use another rollout.engine.kind"
    )
