"""Whether environments answer the stored turns of a run's episodes again as they did.

They are played in a process of its own: no flow process loads what reads tokenizers.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice

from pydantic import TypeAdapter

from infra.config import Settings
from infra.errors import BadInput, WorkerFailed
from infra.processes.watch import await_answer
from infra.store.bundles import fetch_bundle
from infra.store.runs import Run
from infra.store.shards import ShardRef, read_shard
from models.config.environments import EpisodeSettings
from models.records.replays import Difference, ReplayWork
from models.records.seeds import derive_seed
from models.records.versions import policy_of
from tasks.run.batch import without_rollouts
from tasks.run.iteration import Iteration
from tasks.views.metrics import sealed_iterations


class EnvironmentCheck(Settings):
    """What came of episodes that were played again."""

    episodes: int = 0
    """How many were."""
    differences: tuple[Difference, ...] = ()
    """Turns that were answered otherwise."""
    unchecked: str = ""
    """Why none was played; empty otherwise."""

    def lines(self) -> list[str]:
        """Say it, a line for each difference."""
        if self.unchecked:
            return [f"no episode was played again: {self.unchecked}"]
        same = f"{self.episodes} episodes were played again: new environments answer as the shards say"
        return [each.line() for each in self.differences] or [same]


def check_environment(run: Run, *, episodes: int) -> EnvironmentCheck:
    """Have new environments answer the turns of so many stored episodes, which the run's seed chooses.

    Raises BadInput where the environment cannot be used.
    """
    number = len(sealed_iterations(run))
    newest = Iteration(run, max(number, 1))
    unchecked = _reason_against(newest.rollout.environment)
    chosen = () if unchecked else tuple(islice(_drawn(run, number), episodes))
    if not chosen:
        return EnvironmentCheck(unchecked=unchecked or f"run {run.name!r} has none in a sealed iteration")
    environment = newest.rollout.environment
    assert environment is not None, "a run without an environment is not checked"
    work = ReplayWork(
        run_uri=run.store.uri,
        environment=environment,
        sampling=newest.rollout.sampling,
        policy=fetch_bundle(run.store, policy_of(newest.update).weights),
        prompts=newest.prompts.shards[0],
        episodes=chosen,
    )
    return EnvironmentCheck(episodes=len(chosen), differences=tuple(_ask(work)))


def _reason_against(environment: EpisodeSettings | None) -> str:
    if environment is None:
        return "the run has no environment"
    if environment.process is None:
        return "a model plays the user, whose replies follow from all that a batch asks it together"
    return ""


def _drawn(run: Run, sealed: int) -> Iterator[tuple[ShardRef, int]]:
    """Yield shards of rollouts and rows in an order by chance, but those whose prompts were forgotten."""
    gone = without_rollouts(run, range(1, sealed + 1))
    iterations = [Iteration(run, number) for number in range(1, sealed + 1) if number not in gone]
    shards = [manifest.shards[0] for iteration in iterations for manifest in iteration.stage("rollout")]
    rows = [(shard, row) for shard in shards for row in range(shard.rows)]
    random.Random(derive_seed("replay", Iteration(run, 1).seed)).shuffle(rows)
    prompts: dict[str, list[str]] = {}
    for shard, row in rows:
        if shard.key not in prompts:
            prompts[shard.key] = read_shard(run.store, shard, columns=["prompt"])["prompt"].to_pylist()
        if prompts[shard.key][row]:
            yield shard, row


def _ask(work: ReplayWork) -> list[Difference]:
    command = [sys.executable, "-P", "-m", "models.commands.replay"]
    code, answer, errors = await_answer("the replay", command, TypeAdapter(ReplayWork).dump_json(work))
    try:
        told = json.loads(answer)
    except ValueError:
        raise WorkerFailed(f"the replay ended with code {code}: {errors.decode()[-2000:]}") from None
    if told["error"]:
        raise BadInput(told["error"])
    return [Difference.model_validate(each) for each in told["differences"]]
