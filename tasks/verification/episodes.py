"""Check that the environments of a run still behave as they did when its episodes were stored.

The episodes are replayed in a separate process, because no flow process loads code that reads tokenizers.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice

from pydantic import TypeAdapter

from rheostat.infra.config import Settings
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, WorkerFailed
from rheostat.infra.processes.watch import run_watched
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.models.config.episodes import EpisodeSettings
from rheostat.models.records.replays import Difference, ReplayWork
from rheostat.models.records.seeds import derive_seed
from rheostat.models.records.versions import policy_of
from rheostat.tasks.run.batch import iterations_without_rollouts
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.views.metrics import sealed_iterations


class EnvironmentCheck(Settings):
    """Result of replaying stored episodes against new environments."""

    episodes: int = 0
    """Number of replayed episodes."""
    differences: tuple[Difference, ...] = ()
    """Turns in which a new environment responded differently from the stored response."""
    unchecked: str = ""
    """Reason why no episode was replayed. Empty if episodes were replayed."""

    def lines(self) -> list[str]:
        """Describe the result as lines for the terminal, one for each difference."""
        if self.unchecked:
            return [f"no episode was replayed: {self.unchecked}"]
        replayed = format_count(self.episodes, "episode was", "episodes were")
        same = f"{replayed} replayed: new environments responded as stored"
        return [each.line() for each in self.differences] or [same]


def check_environment(run: Run, *, episodes: int) -> EnvironmentCheck:
    """Replay a number of stored episodes in new environments and compare the responses. Episodes are chosen at random,
    but always the same for a run.

    Raises BadInput if the environment cannot be used, and WorkerFailed if the replay crashes.
    """
    number = len(sealed_iterations(run))
    newest = Iteration(run, max(number, 1))
    unchecked = _reason_against(newest.rollout.environment)
    chosen = () if unchecked else tuple(islice(_sample_episodes(run, number), episodes))
    if not chosen:
        return EnvironmentCheck(unchecked=unchecked or f"run {run.name!r} has no episode in a completed iteration")
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
    return EnvironmentCheck(episodes=len(chosen), differences=tuple(_run_replay(work)))


def _reason_against(environment: EpisodeSettings | None) -> str:
    if environment is None:
        return "the run has no environment"
    if environment.stepped is None:
        return "agents run their own programs, which are not replayed"
    if environment.process is None:
        return "a model simulates the user, and its replies depend on the other requests of its batch"
    return ""


def _sample_episodes(run: Run, sealed: int) -> Iterator[tuple[ShardRef, int]]:
    """Yield (rollout shard, row) for stored episodes of all completed iterations, in random order. Rows whose prompts
    were erased are skipped."""
    deleted = iterations_without_rollouts(run, range(1, sealed + 1))
    iterations = [Iteration(run, number) for number in range(1, sealed + 1) if number not in deleted]
    shards = [manifest.shards[0] for iteration in iterations for manifest in iteration.shard_manifests("rollout")]
    rows = [(shard, row) for shard in shards for row in range(shard.rows)]
    random.Random(derive_seed("replay", Iteration(run, 1).seed)).shuffle(rows)
    prompts: dict[str, list[str]] = {}
    for shard, row in rows:
        if shard.key not in prompts:
            prompts[shard.key] = read_shard(run.store, shard, columns=["prompt"])["prompt"].to_pylist()
        if prompts[shard.key][row]:
            yield shard, row


def _run_replay(work: ReplayWork) -> list[Difference]:
    command = [sys.executable, "-P", "-m", "rheostat.models.commands.replay"]
    code, answer, errors = run_watched("the replay", command, TypeAdapter(ReplayWork).dump_json(work))
    try:
        response = json.loads(answer)
    except ValueError:
        raise WorkerFailed(
            f"The process that replays episodes failed with exit code {code}. Its last output is: "
            f"{errors.decode()[-2000:]}"
        ) from None
    if response["error"]:
        raise BadInput(response["error"])
    return [Difference.model_validate(each) for each in response["differences"]]
