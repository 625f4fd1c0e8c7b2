"""The scoring worker: it turns rollout shards into score shards and sample shards."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.errors import Damaged, Quarantined, WorkerLost
from rheostat.infra.store.shards import ShardRef, read_shard, write_shard
from rheostat.models.config.algorithms import Grpo, Ppo
from rheostat.models.config.policy_losses import ConstantMean, SequenceMean, TokenMean
from rheostat.models.config.reward_terms import NumericReward, RegexReward, TargetReward
from rheostat.models.config.rollout import DynamicSampling
from rheostat.models.credit.inputs import TermColumns
from rheostat.models.credit.selection import informative_prompts
from rheostat.models.data.images import media_tables
from rheostat.models.objectives.losses import token_weights
from rheostat.models.records.schemas import ESTIMATE_SCHEMA, SAMPLE_SCHEMA, score_schema
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import CreditWork, ScoredShard, ScoringWork
from rheostat.models.training.samples import open_samples
from rheostat.models.workers.scoring import ScoringWorker
from tests.support.jobs import SEARCH_PATH, is_alive, wait_for
from tests.support.pictures import picture
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.sandboxes import needs_sandbox

SEES = TargetReward(name="sees", target="tests.support.rewards:share_of_red")


def group(prompt_row: int, *texts: str) -> list[dict[str, object]]:
    """Return a row for each completion of a prompt."""
    return [rollout(prompt_row, sample, text) for sample, text in enumerate(texts)]


def score(worker: ScoringWorker, *rollouts: ShardRef) -> CreditWork:
    """Score shards and return the work that computes their credit."""
    scores = [worker.score(ScoringWork(iteration=3, rollouts=ref)).shards[0] for ref in rollouts]
    return CreditWork(iteration=3, shards=tuple(map(ScoredShard, rollouts, scores)), policy_version=2)


def files_of(home: Path) -> list[Path]:
    return sorted(home.rglob("*"))


# ---- scores


def test_scores_keep_the_order_of_rollouts_and_the_raw_value_of_each_term(store, make_worker):
    short = RegexReward(name="short", pattern=r"^.{0,6}$", weight=0.25)
    worker = make_worker(NumericReward(weight=2), short)
    rollouts = write_rollouts(store, rollout(4, 1, "#### 1"), rollout(4, 0, "so it is #### 1"), rollout(2, 0, "2"))
    outcome = worker.score(ScoringWork(iteration=3, rollouts=rollouts))
    table = read_shard(store, outcome.shards[0])
    assert table.schema.remove_metadata() == score_schema(("numeric", "short"))
    assert table.to_pydict() == {
        "prompt_row": [4, 4, 2],
        "sample": [1, 0, 0],
        "reward": [2.25, 2.0, 0.25],
        "reward_numeric": [1.0, 1.0, 0.0],
        "reward_short": [1.0, 0.0, 1.0],
        "error": [None, None, None],
    }
    assert table.schema.metadata[b"iteration"] == b"3"
    assert table.schema.metadata[b"rollouts"] == rollouts.digest.encode()
    assert outcome.metrics == {
        "count": 3, "missing": 0, "reward_sum": 4.5, "term_numeric_sum": 2, "term_short_sum": 2,
        "term_numeric_squares": 2, "term_short_squares": 2,
    }  # fmt: skip


def test_a_term_that_fails_makes_the_total_missing_and_never_zero(store, make_worker):
    obedient = TargetReward(name="obedient", target="tests.support.rewards:obedient")
    worker = make_worker(RegexReward(pattern="."), obedient, timeout_seconds=1)
    rollouts = write_rollouts(store, *group(0, "3", "raise", "hang", "crash", "nan", "4"))
    outcome = worker.score(ScoringWork(iteration=0, rollouts=rollouts))
    table = read_shard(store, outcome.shards[0])
    assert table["reward"].to_pylist() == [4.0, None, None, None, None, 5.0]
    assert table["reward_regex"].to_pylist() == [1.0] * 6
    assert [bool(error) for error in table["error"].to_pylist()] == [False, True, True, True, True, False]
    assert outcome.metrics == {
        "count": 6, "missing": 4, "reward_sum": 9, "term_regex_sum": 2, "term_obedient_sum": 7,
        "term_regex_squares": 2, "term_obedient_squares": 25,
    }  # fmt: skip
    assert worker.progress() == 6


def test_the_same_rollouts_give_the_same_digest_in_another_worker(store, make_worker):
    work = ScoringWork(iteration=0, rollouts=write_rollouts(store, *group(0, "raise", "words", "1")))
    first, second = (make_worker().score(work) for _ in range(2))
    assert first.shards == second.shards
    assert first.metrics == second.metrics


def test_scores_with_too_many_missing_rewards_are_not_written(store, worker, tmp_path):
    rollouts = write_rollouts(store, *group(0, "1", "none", "none"))
    before = files_of(tmp_path)
    with pytest.raises(Quarantined, match=r"iteration 3: 2 of the 3 completions .* 1 more .*2 times.*obedient"):
        worker.score(ScoringWork(iteration=3, rollouts=rollouts, max_missing=1))
    assert files_of(tmp_path) == before
    assert worker.score(ScoringWork(iteration=3, rollouts=rollouts, max_missing=2)).metrics["missing"] == 2


@pytest.mark.thorough
def test_512_completions_are_scored_in_a_fraction_of_a_second(store, make_worker):
    worker = make_worker(NumericReward())
    rollouts = write_rollouts(store, *(rollout(row, 0, f"16+3=19 #### {row}") for row in range(512)))
    work = ScoringWork(iteration=0, rollouts=rollouts)
    worker.score(work)  # starts the process
    fastest = min(worker.score(work).timings["score_seconds"] for _ in range(5))  # other programs may slow one down
    assert fastest < 1  # 0.02 on an idle machine


# ---- images


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=needs_sandbox)])
def test_a_function_with_a_parameter_images_gets_the_images_of_the_prompt(store, make_worker, sandbox):
    [table] = media_tables([picture("red"), picture("blue")])
    media = write_shard(store, table, kind="media", metadata={})
    red, blue = table["digest"].to_pylist()
    rows = [rollout(n, 0, "x", images=images) for n, images in enumerate([[red], [blue, red], []])]
    worker = make_worker(SEES, RegexReward(name="x", pattern="x"), sandbox=sandbox)
    work = ScoringWork(iteration=1, rollouts=write_rollouts(store, *rows), media=(media,))
    table = read_shard(store, worker.score(work).shards[0])
    assert table["reward_sees"].to_pylist() == [1.0, 0.5, -1.0]
    assert table["reward_x"].to_pylist() == [1.0] * 3


def test_an_image_that_is_in_no_media_shard_is_damage_and_gets_no_score(store, make_worker):
    rollouts = write_rollouts(store, rollout(1, 0, "x", images=["0" * 64]))
    with pytest.raises(Damaged, match=r"image 0000.*media shard"):
        make_worker(SEES).score(ScoringWork(iteration=1, rollouts=rollouts))


# ---- credit


def test_samples_have_the_advantages_worked_by_hand(store, make_worker):
    worker = make_worker(max_missing=0.25)
    first = write_rollouts(
        store,
        rollout(2, 0, "1"), rollout(2, 1, "0.0"), rollout(2, 2, "raise"),
        rollout(3, 0, "5"), rollout(3, 1, "5.00", finish_reason="length"),
    )  # fmt: skip
    second = write_rollouts(store, rollout(1, 0, "2"), rollout(1, 1, "-2"))
    outcome = worker.credit(score(worker, first, second))
    table = read_shard(store, outcome.shards[0])
    assert table.schema.remove_metadata() == SAMPLE_SCHEMA
    assert table.to_pydict() == {
        "prompt_row": [1, 1, 2, 2],
        "sample": [0, 1, 0, 1],
        "tokens": [[100, 0], [100, 10, 11], [100, 101, 0], [100, 101, 10, 11, 12]],
        "num_prompt_tokens": [1, 1, 2, 2],
        "images": [[], [], [], []],
        "logprobs": [[0.0], [0.0, -0.5], [0.0], [0.0, -0.5, -1.0]],
        "advantages": [[2.0], [-2.0, -2.0], [0.5], [-0.5, -0.5, -0.5]],
        "staleness": [[0], [0, 0], [0], [0, 0, 0]],
        "values": [None] * 4,
        "returns": [None] * 4,
    }
    assert table.schema.metadata[b"rheostat.kind"] == b"samples"
    assert outcome.metrics == pytest.approx(
        {
            "prompts": 3, "completions": 7, "missing": 1, "missing_fraction": 1 / 7, "bad_logprobs": 0,
            "groups": 3, "informative_groups": 2, "samples": 4, "tokens": 13,
            "reward_mean": 11 / 6, "reward_std": (59 / 6 - (11 / 6) ** 2) ** 0.5,
            "group_reward_std_mean": (0.5 + 0 + 2) / 3, "term_obedient_mean": 11 / 6,
            "term_obedient_std": (59 / 6 - (11 / 6) ** 2) ** 0.5,
            "length_mean": (1 + 3 + 5 + 1 + 4 + 1 + 2) / 7, "truncated_fraction": 1 / 7,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "advantages"),
    [(Grpo(keep_uninformative=True), [[0.0], [0.0, 0.0, 0.0]]), (None, [])],
)
def test_a_group_with_equal_rewards_is_trained_only_if_the_algorithm_keeps_it(
    store, make_worker, algorithm, advantages
):
    worker = make_worker(algorithm=algorithm)
    outcome = worker.credit(score(worker, write_rollouts(store, *group(0, "5", "5.0"))))
    table = read_shard(store, outcome.shards[0])
    assert table["advantages"].to_pylist() == advantages
    assert table.schema.remove_metadata() == SAMPLE_SCHEMA
    assert outcome.metrics["informative_groups"] == 0


def test_a_completion_without_finite_log_probs_is_missing_and_counted(store, make_worker):
    worker = make_worker(max_missing=0.5)
    rows = (*group(0, "1", "0"), rollout(0, 2, "9.5", logprobs=[0.0, float("-inf"), 0.0]))
    outcome = worker.credit(score(worker, write_rollouts(store, *rows)))
    table = read_shard(store, outcome.shards[0])
    assert table.select(("sample", "advantages")).to_pydict() == {"sample": [0, 1], "advantages": [[0.5], [-0.5]]}
    assert (outcome.metrics["bad_logprobs"], outcome.metrics["missing"]) == (1, 1)


def test_estimates_of_the_selected_rows_reach_the_samples(store, make_worker):
    worker = make_worker(algorithm=Ppo(whiten=False))
    work = score(worker, write_rollouts(store, *group(5, "1", "3.0"), *group(1, "4", "0")))
    rows = [{"prompt_row": 5, "sample": 0, "values": [0.5]}, {"prompt_row": 5, "sample": 1, "values": [1.0, 2.0, 4.0]}]
    estimates = write_shard(store, pa.Table.from_pylist(rows, ESTIMATE_SCHEMA), kind="estimates", metadata={})
    kept = replace(work.shards[0], rows=(5,))
    table = read_shard(store, worker.credit(replace(work, shards=(kept,), estimates=(estimates,))).shards[0])
    assert table["values"].to_pylist() == [[0.5], [1.0, 2.0, 4.0]]
    # δ = 3 - 4 = -1 at the last token, 4 - 2 and 2 - 1 before it; λ = 0.95: 2 - 0.95, 1 + 0.95 · 1.05
    assert table["returns"].to_pylist() == [[1.0], pytest.approx([2.9975, 3.05, 3.0])]


def test_too_many_missing_scores_are_refused_with_the_most_frequent_reason(store, make_worker):
    worker = make_worker(max_missing=0.5)
    with pytest.raises(Quarantined, match=r"iteration 3: 3 of 4 completions .* 50.0%.*2 times.*obedient: .*NoneType"):
        worker.credit(score(worker, write_rollouts(store, *group(0, "1", "raise", "none", "none"))))


def test_a_prompt_in_two_shards_is_refused(store, worker):
    shards = write_rollouts(store, *group(1, "1", "0")), write_rollouts(store, *group(1, "2", "0"))
    with pytest.raises(Damaged, match="prompt row 1"):
        worker.credit(score(worker, *shards))


def test_scores_of_other_rollouts_are_refused(store, worker):
    rollouts, others = (write_rollouts(store, rollout(0, 0, "1"), rollout(0, sample, "2")) for sample in (1, 2))
    [shard] = score(worker, others).shards
    with pytest.raises(Damaged, match="'sample' differ"):
        worker.credit(CreditWork(iteration=0, shards=(replace(shard, rollouts=rollouts),)))


# ---- dynamic sampling

DYNAMIC = DynamicSampling()


@pytest.fixture
def waves(store, worker) -> CreditWork:
    """Credit work of two waves: prompts 9 and 3 are informative, 4 and 2 are not; then 5 and 1 are informative."""
    first = write_rollouts(store, *group(9, "1", "0"), *group(4, "5", "5"), *group(3, "2", "0"), *group(2, "7", "7.0"))
    second = write_rollouts(store, *group(5, "1", "3"), *group(1, "4", "0"))
    return score(worker, first, second)


def with_target(work: CreditWork, target: int, **settings: object) -> CreditWork:
    return replace(work, target=target, dynamic=DYNAMIC.model_copy(update=settings))


def trained(store, outcome: Outcome) -> list[tuple[int, int]]:
    table = read_shard(store, outcome.shards[0])
    return list(zip(table["prompt_row"].to_pylist(), table["sample"].to_pylist(), strict=True))


def counts(outcome: Outcome) -> list[float]:
    names = ("issued", "informative", "trained", "filling", "surplus", "shortfall")
    return [outcome.metrics[f"{name}_groups"] for name in names]


@pytest.mark.parametrize(
    ("target", "on_shortfall", "groups", "expected_counts", "surplus"),
    [
        (2, DYNAMIC.on_shortfall, [3, 9], [6, 4, 2, 0, 2, 0], [{"shard": 1, "rows": [5, 1]}]),
        (
            1,
            DYNAMIC.on_shortfall,
            [9],
            [6, 4, 1, 0, 3, 0],
            [{"shard": 0, "rows": [3]}, {"shard": 1, "rows": [5, 1]}],
        ),
        (4, "fail", [1, 3, 5, 9], [6, 4, 4, 0, 0, 0], []),
        (5, "shrink", [1, 3, 5, 9], [6, 4, 4, 0, 0, 1], []),
        (5, "fill", [1, 3, 4, 5, 9], [6, 4, 4, 1, 0, 1], []),
    ],
)
def test_the_first_informative_groups_are_trained_and_the_others_are_surplus(
    store, worker, waves, target, on_shortfall, groups, expected_counts, surplus
):
    outcome = worker.credit(with_target(waves, target, on_shortfall=on_shortfall))
    assert trained(store, outcome) == [(row, sample) for row in groups for sample in (0, 1)]
    assert counts(outcome) == expected_counts
    assert outcome.detail == {"surplus": surplus}


def test_a_shortfall_that_is_not_allowed_fails_with_its_counts(worker, waves):
    with pytest.raises(Quarantined, match=r"iteration 3: .*4 of 6 groups .*5"):
        worker.credit(with_target(waves, 5, on_shortfall="fail"))


def test_the_advantages_equal_those_without_dynamic_sampling(worker, waves):
    dynamic, plain = worker.credit(with_target(waves, 4)), worker.credit(waves)
    assert dynamic.shards == plain.shards
    assert plain.detail is None
    assert "issued_groups" not in plain.metrics


def test_only_the_selected_rows_of_a_shard_are_used(store, worker, waves):
    first, second = waves.shards
    work = replace(waves, shards=(replace(second, rows=(1,)), first))
    outcome = worker.credit(with_target(work, 2))
    assert trained(store, outcome) == [(1, 0), (1, 1), (9, 0), (9, 1)]
    assert outcome.detail == {"surplus": [{"shard": 1, "rows": [3]}]}
    assert counts(outcome) == [5, 3, 2, 0, 1, 0]


def test_groups_that_fill_a_shortfall_have_no_token_in_the_loss(store, worker, waves):
    outcome = worker.credit(with_target(waves, 5, on_shortfall="fill"))
    for row in read_shard(store, outcome.shards[0]).to_pylist():
        fills = row["prompt_row"] == 4
        assert (row["advantages"] == [], row["logprobs"] == []) == (fills, fills)
        assert (len(row["tokens"]) == row["num_prompt_tokens"]) == fills
    samples = open_samples(store, outcome.shards)
    lean = open_samples(store, worker.credit(with_target(waves, 5)).shards)
    for aggregation in (TokenMean(), SequenceMean(), ConstantMean(length=8)):
        filled, plain = (token_weights(aggregation, part.trained_lengths) for part in (samples, lean))
        weights = [w for w, length in zip(filled, samples.trained_lengths, strict=True) if length]
        assert weights == plain


def test_a_group_is_informative_by_the_raw_metric_and_not_by_shaping_terms(store, make_worker):
    obedient = TargetReward(name="obedient", target="tests.support.rewards:obedient")
    worker = make_worker(obedient, RegexReward(name="short", pattern=r"^.{0,1}$", weight=0.1))
    work = score(worker, write_rollouts(store, *group(1, "5", "5.0"), *group(2, "1", "0")))
    expected = (
        (with_target(work, 2), {2}),
        (work, {1, 2}),
        (with_target(work, 2, metric="short"), {1}),
    )
    for each, prompts in expected:
        assert {row for row, _ in trained(store, worker.credit(each))} == prompts


def test_the_score_shard_and_the_credit_name_the_same_informative_groups(store, make_worker):
    worker = make_worker(max_missing=0.5)
    work = score(worker, write_rollouts(store, *group(1, "5", "raise"), *group(2, "1", "0"), *group(3, "1", "1")))
    shards = [read_shard(store, shard) for shard in (work.shards[0].rollouts, work.shards[0].scores)]
    terms = (TermColumns("obedient"),)
    assert informative_prompts(*shards, terms=terms, algorithm=Grpo(), metric="obedient") == [2]
    assert {row for row, _ in trained(store, worker.credit(with_target(work, 3)))} == {2}


def test_an_iteration_without_a_finished_group_gives_no_samples(store, worker):
    work = score(worker, write_rollouts(store))
    plain, dynamic = worker.credit(work), worker.credit(with_target(work, 2, on_shortfall="fill"))
    assert [shard.rows for shard in (*plain.shards, *dynamic.shards)] == [0, 0]
    assert counts(dynamic) == [0, 0, 0, 0, 0, 2]


# ---- killed processes


def test_a_reward_process_that_is_killed_twice_does_not_change_the_digest(store, make_worker, tmp_path):
    path = tmp_path / "pids"
    work = ScoringWork(iteration=0, rollouts=write_rollouts(store, rollout(0, 0, str(path))))
    reward = TargetReward(target="tests.support.rewards:wait_to_be_killed_twice")
    undisturbed = make_worker(reward, timeout_seconds=600).score(work)

    def kill() -> None:
        for number in (1, 2):
            assert wait_for(lambda: len(path.read_text().split("\n")) > number + 1)  # noqa: B023
            os.kill(int(path.read_text().split()[number]), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    disturbed = make_worker(reward, timeout_seconds=600).score(work)
    killer.join()
    assert len(path.read_text().split()) == 4, "one undisturbed, two killed, one to the end"
    assert disturbed.shards == undisturbed.shards


def test_nothing_is_written_if_the_process_of_a_completion_is_killed_each_time(store, make_worker, tmp_path):
    rollouts = write_rollouts(store, *group(4, "1", "kill"))
    before = files_of(tmp_path)
    with pytest.raises(WorkerLost, match=r"iteration 3, prompt 4, sample 1 .*4 times"):
        make_worker(max_missing=1.0).score(ScoringWork(iteration=3, rollouts=rollouts))
    assert files_of(tmp_path) == before


HANGING_WORKER = """
import sys
from rheostat.infra.store.shards import ShardRef
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.reward_terms import TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.work import ScoringWork
from rheostat.models.workers.scoring import ScoringWorker

if __name__ == "__main__":
    reward = TargetReward(target="tests.support.rewards:leave_pid_and_hang")
    worker = ScoringWorker(sys.argv[1], "run", ScoringConfig(rewards=(reward,), timeout_seconds=600), Grpo())
    worker.score(ScoringWork(iteration=0, rollouts=ShardRef.model_validate_json(sys.argv[2])))
"""


def test_a_worker_that_is_killed_leaves_no_reward_process_behind(store, tmp_path):
    rollouts = write_rollouts(store, rollout(0, 0, str(tmp_path / "pids")))
    script = tmp_path / "hanging_worker.py"
    script.write_text(HANGING_WORKER)
    root = Path(__file__).parents[3]
    arguments = [sys.executable, str(script), str(tmp_path), rollouts.model_dump_json()]
    with subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": SEARCH_PATH}, cwd=root) as worker:
        assert wait_for((tmp_path / "pids").exists)
        judge, started = map(int, (tmp_path / "pids").read_text().split())
        try:
            assert is_alive(judge)
            worker.kill()
            assert wait_for(lambda: not is_alive(judge), seconds=60), "the reward process outlived its worker"
        finally:
            os.kill(started, signal.SIGKILL)
