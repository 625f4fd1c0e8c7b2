"""Episodes written over several iterations: cut in a turn or between two, they go on as if they had never been."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from infra.store.shards import read_shard
from infra.store.storage import open_store
from models.config.engines import SamplingConfig, TransformersEngine
from models.config.environments import TargetEnvironment
from models.config.rollout import PartialRollout
from models.modeling.layout import lay_out
from models.modeling.logprobs import ForwardInput, TokenLogprobs
from models.modeling.policy import load_policy
from models.records.model_input import rollout_inputs
from models.workers.rollout import RolloutWorker
from tests.support.interleaving import InterleavingTransformers
from tests.support.rollout_workers import ENGINE, example, publish

STOPS = SamplingConfig(max_new_tokens=40, stop=("a", "e", "o", " ", "1", "0"))
"""A random policy seldom ends a turn of itself."""
PARTIAL = PartialRollout(tokens=7, max_staleness=1)


def environment(name: str = "Echo", **settings: object) -> TargetEnvironment:
    options = settings.pop("options", {})
    more = {"prompts": "text", "parser": "none", "turn_tokens": 12, "step_seconds": 20, "processes": 2} | settings
    return TargetEnvironment(target=f"tests.support.games:{name}", options=options, **more)


@pytest.fixture
def play(tmp_path):
    """Play twenty episodes in one iteration, or their rest in the next, each time in new processes."""
    store = open_store(f"{tmp_path}/run")
    work = replace(example(store, tmp_path / "policy"), sampling=STOPS)

    def run(settings, engine: TransformersEngine = ENGINE, *, after=None, **changes):
        if after is not None:
            asked, made = after
            going_on = {"iteration": asked.iteration + 1, "rows": (), "continued": made.shards[1]}
            changes = going_on | {"policy": replace(asked.policy, version=asked.policy.version + 1)} | changes
        asked = replace(work, **changes)
        worker = RolloutWorker(str(tmp_path), "run", engine, 1, environment=settings)
        try:
            return asked, worker.generate(asked)
        finally:
            worker.close()

    run.store, run.folder = store, tmp_path
    return run


def rows_of(play, *refs):
    rows = [row for ref in refs for row in read_shard(play.store, ref).to_pylist()]
    return {(row["prompt_row"], row["sample"]): row for row in rows}


def written(row):
    """Tokens that policies wrote, by version."""
    return [(each["policy_version"], each["tokens"]) for each in row["segments"] if each["policy_version"] >= 0]


def open_tokens(row):
    """Tokens of the turn that has not ended."""
    ended = sum(turn["tokens"] + turn["observation"] for turn in row["turns"] or ())
    return len(row["completion_tokens"]) - ended


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        (environment("Knows", batches=2), ENGINE),
        (environment("Bad", options={"how": "raise"}), ENGINE),
        (environment("Opens", options={"reward": 1.5}), InterleavingTransformers()),
    ],
)
def test_an_episode_that_goes_on_ends_as_if_it_had_never_been_cut(play, settings, engine):
    _, outcome = play(settings, engine)
    whole = rows_of(play, *outcome.shards)
    first = play(settings, engine, partial=PARTIAL)
    begun = rows_of(play, *first[1].shards)
    second = play(settings, engine, partial=PARTIAL, after=first)
    assert len(second[1].shards) == 1
    found = rows_of(play, first[1].shards[0], second[1].shards[0])
    assert found.keys() == whole.keys()
    cut = [row for row in begun.values() if row["finish_reason"] == "cut"]
    assert any(row["turns"] and open_tokens(row) for row in cut), "one is cut in its second turn"
    assert any(row["turns"] and not open_tokens(row) for row in cut), "one is cut between turns"
    assert all(sum(tokens for _, tokens in written(row)) == 7 for row in cut)
    for name, expected in whole.items():
        row = found[name]
        assert row["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)  # batches have other neighbours
        for column in row.keys() - {"logprobs", "segments"}:
            assert row[column] == expected[column], column
        by_version = {version: sum(n for v, n in written(row) if v == version) for version, _ in written(row)}
        sampled = sum(turn["tokens"] for turn in row["turns"])
        was_cut = begun[name]["finish_reason"] == "cut"
        assert by_version == ({0: 7, 1: sampled - 7} if was_cut and sampled > 7 else {0: sampled})


def test_log_probs_are_those_of_the_policy_that_wrote_each_token_and_what_stood_there_stays(play):
    settings = environment()
    first = play(settings, partial=PARTIAL)
    second = play(settings, partial=PARTIAL, after=first, policy=publish(play.store, play.folder / "other", seed=1))
    before, table = rows_of(play, first[1].shards[1]), read_shard(play.store, second[1].shards[0])
    folders = (play.folder / "policy", play.folder / "other")
    policies = [load_policy(folder, device="cpu", dtype=torch.float32).eval() for folder in folders]
    several = 0
    for read, row in zip(rollout_inputs(table), table.to_pylist(), strict=True):
        old = before[row["prompt_row"], row["sample"]]
        kept = len(old["completion_tokens"])
        assert (row["completion_tokens"][:kept], row["logprobs"][:kept]) == (old["completion_tokens"], old["logprobs"])
        assert (row["messages"] or [])[: len(old["messages"] or [])] == (old["messages"] or [])
        if old["finish_reason"] != "cut":
            assert row == old
        versions = np.repeat(*zip(*written(row), strict=True))
        several += len({*versions}) == 2
        logprobs = np.array(row["logprobs"])[read.written - read.num_prompt_tokens]
        for version, policy in enumerate(policies):
            with torch.no_grad():
                forward = TokenLogprobs(policy, temperature=1.0)
                found = forward(ForwardInput.of(lay_out([read]), torch.device("cpu"), shares=False)).numpy()
            np.testing.assert_allclose(found[versions == version], logprobs[versions == version], atol=2e-5)
    assert several > 5


def test_an_episode_is_cut_again_until_it_is_as_stale_as_it_may_be_whatever_its_environment_said(play):
    once = PartialRollout(tokens=4, max_staleness=2)
    _, outcome = play(environment())
    whole = rows_of(play, *outcome.shards)
    first = play(environment(), partial=once)
    second = play(environment(), partial=once, after=first)
    third = play(environment(), partial=once, after=second)
    assert len(third[1].shards) == 1
    found = rows_of(play, *(made.shards[0] for _, made in (first, second, third)))
    assert {name: row["completion_tokens"] for name, row in found.items()} == {
        name: row["completion_tokens"] for name, row in whole.items()
    }
    stale = [row for row in found.values() if len(dict(written(row))) == 3]
    assert any(segment["policy_version"] == -1 for row in stale for segment in row["segments"][:-1])
    for row in stale:
        assert [sum(n for v, n in written(row) if v == version) for version in (0, 1)] == [4, 4]
    for number, (_, made) in enumerate((first, second, third)):
        assert made.metrics["tokens"] == sum(
            tokens for row in rows_of(play, *made.shards).values() for v, tokens in written(row) if v == number
        )


def test_the_same_pieces_have_the_same_digests_with_any_number_of_processes(play):
    for settings in (environment(processes=1), environment(processes=4)):
        first = play(settings, partial=PARTIAL)
        second = play(settings, partial=PARTIAL, after=first)
        made = [shard.digest for _, outcome in (first, second) for shard in outcome.shards]
        if settings.processes == 1:
            expected = made
    assert made == expected
