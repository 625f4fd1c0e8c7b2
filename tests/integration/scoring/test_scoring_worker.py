"""The scoring worker: rollout shards in, score and sample shards out."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from infra.errors import Damaged, Quarantined, WorkerLost
from infra.store.shards import ShardRef, read_shard, write_shard
from infra.store.storage import Store, open_store
from models.config.algorithms import AlgorithmConfig, DrGrpo, Grpo, Ppo
from models.config.objectives import ConstantMean, SequenceMean, TokenMean
from models.config.reward_terms import NumericReward, RegexReward, TargetReward
from models.config.rewards import ScoringConfig
from models.config.rollout import DynamicSampling
from models.credit.inputs import TermColumns
from models.credit.selection import informative_prompts
from models.data.images import media_tables
from models.objectives.losses import token_weights
from models.records.schemas import ESTIMATE_SCHEMA, SAMPLE_SCHEMA, score_schema
from models.records.versions import Outcome
from models.records.work import CreditWork, ScoredShard, ScoringWork
from models.training.samples import open_samples
from models.workers.scoring import ScoringWorker
from tests.support.jobs import wait_for
from tests.support.pictures import picture
from tests.support.rollout_shards import rollout, write_rollouts
from tests.support.sandboxes import needs_sandbox

OBEDIENT = TargetReward(name="obedient", target="tests.support.rewards:obedient")

Make = Callable[..., ScoringWorker]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"{tmp_path}/run")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    workers: list[ScoringWorker] = []

    def worker(scoring: ScoringConfig, algorithm: AlgorithmConfig | None = None) -> ScoringWorker:
        workers.append(ScoringWorker(str(tmp_path), "run", scoring, algorithm or DrGrpo()))
        return workers[-1]

    yield worker
    for opened in workers:
        opened.close()


def scored(worker: ScoringWorker, *rollouts: ShardRef) -> CreditWork:
    scores = [worker.score(ScoringWork(iteration=3, rollouts=ref)).shards[0] for ref in rollouts]
    return CreditWork(iteration=3, shards=tuple(map(ScoredShard, rollouts, scores)), policy_version=2)


def test_scores_keep_the_order_of_rollouts_and_the_raw_value_of_each_term(store: Store, make: Make):
    short = RegexReward(name="short", pattern=r"^.{0,6}$", weight=0.25)
    worker = make(ScoringConfig(rewards=(NumericReward(weight=2), short)))
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


def test_a_term_that_fails_makes_the_total_missing_and_never_zero(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(RegexReward(pattern="."), OBEDIENT), timeout_seconds=1))
    completions = ["3", "raise", "hang", "crash", "nan", "4"]
    rollouts = write_rollouts(store, *(rollout(0, sample, text) for sample, text in enumerate(completions)))
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


def test_the_same_rollouts_give_the_same_digest_in_another_worker(store: Store, make: Make):
    rollouts = write_rollouts(store, rollout(0, 0, "raise"), rollout(0, 1, "words"), rollout(0, 2, "1"))
    work = ScoringWork(iteration=0, rollouts=rollouts)
    first, second = (make(ScoringConfig(rewards=(OBEDIENT,))).score(work) for _ in range(2))
    assert first.shards == second.shards
    assert first.metrics == second.metrics


def test_samples_carry_the_advantages_worked_by_hand(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,), max_missing=0.25))
    first = write_rollouts(
        store,
        rollout(2, 0, "1"), rollout(2, 1, "0.0"), rollout(2, 2, "raise"),
        rollout(3, 0, "5"), rollout(3, 1, "5.00", finish_reason="length"),
    )  # fmt: skip
    second = write_rollouts(store, rollout(1, 0, "2"), rollout(1, 1, "-2"))
    outcome = worker.credit(scored(worker, first, second))
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


def test_equal_groups_are_kept_where_the_algorithm_says_so(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)), Grpo(keep_uninformative=True))
    outcome = worker.credit(scored(worker, write_rollouts(store, rollout(0, 0, "5"), rollout(0, 1, "5.0"))))
    assert read_shard(store, outcome.shards[0])["advantages"].to_pylist() == [[0.0], [0.0, 0.0, 0.0]]
    assert outcome.metrics["informative_groups"] == 0


def test_nothing_to_learn_is_a_shard_without_rows(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    outcome = worker.credit(scored(worker, write_rollouts(store, rollout(0, 0, "5"), rollout(0, 1, "5"))))
    table = read_shard(store, outcome.shards[0])
    assert table.num_rows == 0
    assert table.schema.remove_metadata() == SAMPLE_SCHEMA


def test_a_completion_without_finite_log_probs_is_missing_and_counted(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,), max_missing=0.5))
    rows = (rollout(0, 0, "1"), rollout(0, 1, "0"), rollout(0, 2, "9.5", logprobs=[0.0, float("-inf"), 0.0]))
    outcome = worker.credit(scored(worker, write_rollouts(store, *rows)))
    table = read_shard(store, outcome.shards[0])
    assert table.select(("sample", "advantages")).to_pydict() == {"sample": [0, 1], "advantages": [[0.5], [-0.5]]}
    assert (outcome.metrics["bad_logprobs"], outcome.metrics["missing"]) == (1, 1)


DYNAMIC = DynamicSampling()


def group(prompt_row: int, *texts: str) -> list[dict[str, object]]:
    return [rollout(prompt_row, sample, text) for sample, text in enumerate(texts)]


def waves(store: Store, worker: ScoringWorker, *, target: int, **settings: object) -> CreditWork:
    """Two waves: prompts 9 and 3 differ, 4 and 2 are equal; then 1 and 5 differ."""
    first = write_rollouts(store, *group(9, "1", "0"), *group(4, "5", "5"), *group(3, "2", "0"), *group(2, "7", "7.0"))
    second = write_rollouts(store, *group(5, "1", "3"), *group(1, "4", "0"))
    work = scored(worker, first, second)
    return replace(work, target=target, dynamic=DYNAMIC.model_copy(update=settings))


def trained(store: Store, outcome: Outcome) -> list[tuple[int, int]]:
    table = read_shard(store, outcome.shards[0])
    return list(zip(table["prompt_row"].to_pylist(), table["sample"].to_pylist(), strict=True))


def counts(outcome: Outcome) -> list[float]:
    names = ("issued", "informative", "trained", "filling", "surplus", "shortfall")
    return [outcome.metrics[f"{name}_groups"] for name in names]


def test_the_first_informative_groups_are_trained_and_the_others_are_surplus(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    outcome = worker.credit(waves(store, worker, target=2))
    assert trained(store, outcome) == [(3, 0), (3, 1), (9, 0), (9, 1)]
    assert outcome.detail == {"surplus": [{"shard": 1, "rows": [5, 1]}]}
    assert counts(outcome) == [6, 4, 2, 0, 2, 0]
    outcome = worker.credit(waves(store, worker, target=1))
    assert trained(store, outcome) == [(9, 0), (9, 1)]
    assert outcome.detail == {"surplus": [{"shard": 0, "rows": [3]}, {"shard": 1, "rows": [5, 1]}]}


def test_what_is_trained_has_the_advantages_that_it_has_without_dynamic_sampling(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    work = waves(store, worker, target=4)
    dynamic, plain = worker.credit(work), worker.credit(replace(work, target=None, dynamic=None))
    assert dynamic.shards == plain.shards
    assert plain.detail is None
    assert "issued_groups" not in plain.metrics


def test_only_the_rows_of_a_shard_that_count_are_looked_at(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    work = waves(store, worker, target=2)
    kept = replace(work.shards[1], rows=(1,))
    outcome = worker.credit(replace(work, shards=(kept, work.shards[0])))
    assert trained(store, outcome) == [(1, 0), (1, 1), (9, 0), (9, 1)]
    assert outcome.detail == {"surplus": [{"shard": 1, "rows": [3]}]}
    assert counts(outcome) == [5, 3, 2, 0, 1, 0]


def test_estimates_of_the_rows_that_count_reach_the_samples(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)), Ppo(whiten=False))
    work = scored(worker, write_rollouts(store, *group(5, "1", "3.0"), *group(1, "4", "0")))
    rows = [{"prompt_row": 5, "sample": 0, "values": [0.5]}, {"prompt_row": 5, "sample": 1, "values": [1.0, 2.0, 4.0]}]
    estimates = write_shard(store, pa.Table.from_pylist(rows, ESTIMATE_SCHEMA), kind="estimates", metadata={})
    kept = replace(work.shards[0], rows=(5,))
    table = read_shard(store, worker.credit(replace(work, shards=(kept,), estimates=(estimates,))).shards[0])
    assert table["values"].to_pylist() == [[0.5], [1.0, 2.0, 4.0]]
    # δ = 3 - 4 = -1 at the last token, 4 - 2 and 2 - 1 before it; λ = 0.95: 2 - 0.95, 1 + 0.95 · 1.05
    assert table["returns"].to_pylist() == [[1.0], pytest.approx([2.9975, 3.05, 3.0])]


def test_a_shortfall_shrinks_the_iteration(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    outcome = worker.credit(waves(store, worker, target=5, on_shortfall="shrink"))
    assert {row for row, _ in trained(store, outcome)} == {1, 3, 5, 9}
    assert counts(outcome) == [6, 4, 4, 0, 0, 1]
    assert outcome.detail == {"surplus": []}


def test_a_shortfall_is_filled_with_groups_that_have_no_token_in_the_loss(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    outcome = worker.credit(waves(store, worker, target=5, on_shortfall="fill"))
    assert {row for row, _ in trained(store, outcome)} == {1, 3, 4, 5, 9}
    assert counts(outcome) == [6, 4, 4, 1, 0, 1]
    rows = read_shard(store, outcome.shards[0]).to_pylist()
    for row in rows:
        fills = row["prompt_row"] == 4
        assert (row["advantages"] == [], row["logprobs"] == []) == (fills, fills)
        assert (len(row["tokens"]) == row["num_prompt_tokens"]) == fills
    samples = open_samples(store, outcome.shards)
    lean = open_samples(store, worker.credit(waves(store, worker, target=5)).shards)
    for aggregation in (TokenMean(), SequenceMean(), ConstantMean(length=8)):
        filled, plain = (token_weights(aggregation, part.learnt_lengths) for part in (samples, lean))
        weights = [w for w, length in zip(filled, samples.learnt_lengths, strict=True) if length]
        assert weights == plain


def test_a_shortfall_that_must_not_be_fails_with_its_counts(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    with pytest.raises(Quarantined, match=r"iteration 3: 4 of 6 groups are informative .* expected 5 "):
        worker.credit(waves(store, worker, target=5, on_shortfall="fail"))
    assert counts(worker.credit(waves(store, worker, target=4, on_shortfall="fail"))) == [6, 4, 4, 0, 0, 0]


def test_a_group_is_informative_by_the_raw_term_and_not_by_what_shapes_it(store: Store, make: Make):
    shaping = RegexReward(name="short", pattern=r"^.{0,1}$", weight=0.1)
    worker = make(ScoringConfig(rewards=(OBEDIENT, shaping)))
    work = scored(worker, write_rollouts(store, *group(1, "5", "5.0"), *group(2, "1", "0")))
    dynamic = replace(work, target=2, dynamic=DYNAMIC)
    assert {row for row, _ in trained(store, worker.credit(dynamic))} == {2}
    assert {row for row, _ in trained(store, worker.credit(work))} == {1, 2}
    shaped = replace(dynamic, dynamic=DynamicSampling(metric="short"))
    assert {row for row, _ in trained(store, worker.credit(shaped))} == {1}


def test_the_groups_that_a_score_shard_calls_informative_are_those_that_credit_finds(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,), max_missing=0.5))
    work = scored(worker, write_rollouts(store, *group(1, "5", "raise"), *group(2, "1", "0"), *group(3, "1", "1")))
    shards = [read_shard(store, shard) for shard in (work.shards[0].rollouts, work.shards[0].scores)]
    terms = (TermColumns("obedient"),)
    assert informative_prompts(*shards, terms=terms, algorithm=Grpo(), metric="obedient") == [2]
    outcome = worker.credit(replace(work, target=3, dynamic=DYNAMIC))
    assert {row for row, _ in trained(store, outcome)} == {2}


def test_an_iteration_without_a_finished_group_gives_no_samples(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    work = scored(worker, write_rollouts(store))
    for asked in (work, replace(work, target=2, dynamic=DynamicSampling(on_shortfall="fill"))):
        outcome = worker.credit(asked)
        assert read_shard(store, outcome.shards[0]).num_rows == 0
    assert counts(outcome) == [0, 0, 0, 0, 0, 2]


def test_a_prompt_in_two_shards_is_refused(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    shards = write_rollouts(store, *group(1, "1", "0")), write_rollouts(store, *group(1, "2", "0"))
    with pytest.raises(Damaged, match="prompt row 1 is in an earlier pair"):
        worker.credit(scored(worker, *shards))


def test_too_many_missing_scores_are_refused_with_the_commonest_reason(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,), max_missing=0.5))
    completions = ["1", "raise", "none", "none"]
    rows = (rollout(0, sample, text) for sample, text in enumerate(completions))
    expected = r"iteration 3: 3 of 4 completions .* at most 50.0% .*\(2 times\): obedient: .* found NoneType"
    with pytest.raises(Quarantined, match=expected):
        worker.credit(scored(worker, write_rollouts(store, *rows)))


def test_scores_that_credit_would_refuse_are_not_written(store: Store, make: Make, tmp_path: Path):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    rollouts = write_rollouts(store, *(rollout(0, sample, text) for sample, text in enumerate(("1", "none", "none"))))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        Quarantined, match=r"iteration 3: 2 of 3 completions .* at most 1 more .*\(2 times\): obedient:"
    ):
        worker.score(ScoringWork(iteration=3, rollouts=rollouts, bearable=1))
    assert sorted(tmp_path.rglob("*")) == before
    assert worker.score(ScoringWork(iteration=3, rollouts=rollouts, bearable=2)).metrics["missing"] == 2


def test_a_reward_process_that_is_killed_again_and_again_leaves_the_digest_as_it_was(
    store: Store, make: Make, tmp_path: Path
):
    told = tmp_path / "pids"
    rollouts = write_rollouts(store, rollout(0, 0, str(told)))
    work = ScoringWork(iteration=0, rollouts=rollouts)
    scoring = ScoringConfig(rewards=(TargetReward(target="tests.support.rewards:tell_pid_and_wait"),))
    undisturbed = make(scoring).score(work)

    def kill() -> None:
        for number in (1, 2):
            assert wait_for(lambda: len(told.read_text().split()) > number, seconds=60)  # noqa: B023
            os.kill(int(told.read_text().split()[number]), signal.SIGKILL)

    striking = threading.Thread(target=kill)
    striking.start()
    disturbed = make(scoring).score(work)
    striking.join()
    assert len(told.read_text().split()) == 4, "one undisturbed, two killed, one to the end"
    assert disturbed.shards == undisturbed.shards


def test_nothing_is_written_where_the_process_of_a_completion_is_ended_each_time(
    store: Store, make: Make, tmp_path: Path
):
    rollouts = write_rollouts(store, rollout(4, 0, "1"), rollout(4, 1, "kill"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(WorkerLost, match="judges iteration 3, prompt 4, sample 1 was ended 4 times in a row"):
        make(ScoringConfig(rewards=(OBEDIENT,), max_missing=1.0)).score(ScoringWork(iteration=3, rollouts=rollouts))
    assert sorted(tmp_path.rglob("*")) == before


def test_scores_of_other_rollouts_are_refused(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(OBEDIENT,)))
    ours, other = (write_rollouts(store, rollout(0, 0, "1"), rollout(0, sample, "2")) for sample in (1, 2))
    [shard] = scored(worker, other).shards
    with pytest.raises(Damaged, match="sample differ"):
        worker.credit(CreditWork(iteration=0, shards=(replace(shard, rollouts=ours),)))


def test_scoring_512_completions_takes_a_fraction_of_a_second(store: Store, make: Make):
    worker = make(ScoringConfig())
    rollouts = write_rollouts(store, *(rollout(row, 0, f"16+3=19 #### {row}") for row in range(512)))
    work = ScoringWork(iteration=0, rollouts=rollouts)
    worker.score(work)  # starts the process
    assert worker.score(work).timings["score_seconds"] < 1  # 0.02 on an idle machine


HANGING_WORKER = """
import sys
from infra.store.shards import ShardRef
from models.config.algorithms import Grpo
from models.config.reward_terms import TargetReward
from models.config.rewards import ScoringConfig
from models.records.work import ScoringWork
from models.workers.scoring import ScoringWorker

if __name__ == "__main__":
    reward = TargetReward(target="tests.support.rewards:leave_pid_and_hang")
    worker = ScoringWorker(sys.argv[1], "run", ScoringConfig(rewards=(reward,), timeout_seconds=600), Grpo())
    worker.score(ScoringWork(iteration=0, rollouts=ShardRef.model_validate_json(sys.argv[2])))
"""


def test_a_worker_that_is_killed_leaves_no_reward_process_behind(store: Store, tmp_path: Path):
    rollouts = write_rollouts(store, rollout(0, 0, str(tmp_path / "pids")))
    script = tmp_path / "hanging_worker.py"
    script.write_text(HANGING_WORKER)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    arguments = [sys.executable, str(script), str(tmp_path), rollouts.model_dump_json()]
    with subprocess.Popen(arguments, env=environment, cwd=root) as worker:
        judge, started = map(int, awaited(tmp_path / "pids").read_text().split())
        try:
            assert running(judge)
            worker.kill()
            deadline = time.monotonic() + 5
            while running(judge):
                assert time.monotonic() < deadline, "the reward process outlived its worker"
                time.sleep(0.02)
        finally:
            os.kill(started, signal.SIGKILL)


def awaited(path: Path) -> Path:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)
    return path


def running(pid: int) -> bool:
    """Return whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("sandbox", ["none", pytest.param("bubblewrap", marks=needs_sandbox)])
def test_a_function_with_a_parameter_images_is_given_those_of_the_prompt(store: Store, make: Make, sandbox: str):
    [table] = media_tables([picture("red"), picture("blue")])
    media = write_shard(store, table, kind="media", metadata={})
    red, blue = table["digest"].to_pylist()
    rows = [rollout(n, 0, "x", images=shown) for n, shown in enumerate([[red], [blue, red], []])]
    sees = TargetReward(name="sees", target="tests.support.rewards:share_of_red")
    worker = make(ScoringConfig(rewards=(sees, RegexReward(name="x", pattern="x")), sandbox=sandbox))
    work = ScoringWork(iteration=1, rollouts=write_rollouts(store, *rows), media=(media,))
    table = read_shard(store, worker.score(work).shards[0])
    assert table["reward_sees"].to_pylist() == [1.0, 0.5, -1.0]
    assert table["reward_x"].to_pylist() == [1.0] * 3


def test_an_image_that_no_shard_has_is_damage_and_no_verdict(store: Store, make: Make):
    worker = make(ScoringConfig(rewards=(TargetReward(name="sees", target="tests.support.rewards:share_of_red"),)))
    rollouts = write_rollouts(store, rollout(1, 0, "x", images=["0" * 64]))
    with pytest.raises(Damaged, match=r"image 0000.*: expected it in a media shard, found none that has it"):
        worker.score(ScoringWork(iteration=1, rollouts=rollouts))
