"""Runs with a curriculum: the choice of prompts follows from stored solve rates, also after an interruption."""

import pytest

from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.tasks.forks.creation import request_fork
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.solve_rates import read_solve_rates
from rheostat.tasks.verification.invariants import check_invariants, verify_run
from tests.support.in_process import InProcessJob, copy_job
from tests.support.json_lines import write_json_lines
from tests.support.whole_runs import check_same_run, copy_until

pytestmark = pytest.mark.timeout(1200)

FEW = ("iterations=5", "data.options.train_problems=24", "retention.keep_last=6")
CURRICULUM = "rollout.curriculum={candidates=2,explore=0.25,unseen_solve_rate=0.0}"
OURS = ("pools.cluster=threads", "report=false")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prefect_api) -> InProcessJob:
    """Run of five iterations with six prompts each. An epoch of 24 prompts in pairs has two iterations."""
    job = InProcessJob(tmp_path_factory.mktemp("curriculum"), prefect_api)
    job.train(*FEW, CURRICULUM)
    return job


def run_of(job, name="tiny") -> Run:
    return open_run(str(job.store), name)


def rows_of(run, number):
    return [row for batch in Iteration(run, number).batches for row in batch.plan.rows]


def measured(run, number):
    """Return the mean score of each prompt of an iteration, from its score shards."""
    scores: dict[int, list[float]] = {}
    for manifest in Iteration(run, number).shard_manifests("scoring"):
        table = read_shard(run.store, manifest.shards[0])
        name = next(name for name in table.column_names if name.startswith("reward_"))
        for row, score in zip(table["prompt_row"].to_pylist(), table[name].to_pylist(), strict=True):
            scores.setdefault(row, []).append(score)
    return {row: sum(values) / len(values) for row, values in scores.items()}


def check_metrics(run: Run, *, lag: int) -> None:
    """Check that each seal describes its prompts by the scores of the iterations that are at least `lag` older."""
    known, repeated = dict[int, float](), 0
    for number in range(1, 6):
        known |= measured(run, number - lag) if number > lag else {}
        rows, metrics = rows_of(run, number), run.require(f"it-000{number}/seal").metrics
        assert ("plan/unseen_fraction" in metrics) == bool(rows), "an iteration may only continue earlier completions"
        seen = [known[row] for row in rows if row in known]
        assert metrics.get("plan/unseen_fraction", 1) == pytest.approx(1 - len(seen) / max(1, len(rows)))
        assert metrics.get("plan/solve_rate_mean", 0) == pytest.approx(sum(seen) / max(1, len(seen)))
        assert number > lag or not seen
        repeated += len(seen)
    assert repeated, "prompts were issued again"


def spoil(run: Run, key: str, **changes: object) -> list[str]:
    """Replace details of a manifest, and return the reported problems."""
    manifest = run.require(key)
    path = run.store.local_path(f"manifests/{key}.json")
    path.chmod(0o644)
    path.write_bytes(Manifest.encode(manifest.model_copy(update={"detail": {**manifest.detail, **changes}})))
    return check_invariants(open_run(str(path).split(f"/{run.name}/")[0], run.name))


def test_the_credit_stage_stores_the_solve_rates_and_the_seal_what_was_known_before(trained):
    run = run_of(trained)
    check_metrics(run, lag=1)
    rates = [read_solve_rates(Iteration(run, number).credit) for number in range(1, 6)]
    assert rates == [pytest.approx(measured(run, number)) for number in range(1, 6)]
    assert len({rate for each in rates for rate in each.values()}) > 1, "the prompts have different solve rates"
    assert verify_run(str(trained.store), "tiny") == []


def test_no_prompt_is_issued_twice_in_an_epoch_and_later_epochs_follow_the_solve_rates(trained, tmp_path, prefect_api):
    run = run_of(trained)
    for first in (1, 3):
        assert len({*rows_of(run, first), *rows_of(run, first + 1)}) == 12
    fork = copy_job(trained, tmp_path / "job")
    with fork.prefect():
        from rheostat.flows.fork import fork as fork_run

        changes = ["rollout.curriculum.target=0.999", "iterations=4", *OURS]
        run_flow(fork_run("tiny@2", "harder", changes, store=str(fork.store)))
    assert rows_of(run_of(fork, "harder"), 3) != rows_of(run, 3)
    assert verify_run(str(fork.store), "harder") == []


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("iteration", [3, 5])
def test_a_run_that_was_killed_and_resumed_chooses_the_same_prompts(trained, tmp_path, prefect_api, iteration):
    job = InProcessJob(tmp_path / "resumed", prefect_api)
    copy_until(trained.run, job.run, iteration=iteration)
    job.train(*FEW, CURRICULUM)
    check_same_run(job.run, trained.run)


def test_changed_solve_rates_and_plans_are_reported(trained, tmp_path):
    run = run_of(copy_job(trained, tmp_path / "rates"))
    rates = read_solve_rates(run.require("it-0001/credit"))
    wrong = {"rows": [*rates], "rates": [0.125, *[*rates.values()][1:]]}
    problems = spoil(run, "it-0001/credit", solve_rates=wrong)
    assert any(f"it-0001/credit: the solve rate of row {next(iter(rates))}" in line for line in problems)
    run = run_of(copy_job(trained, tmp_path / "plans"))
    plan = run.require("it-0003/plan")
    problems = spoil(run, "it-0003/plan", rows=[*plan.detail["rows"]][::-1])
    assert any("it-0003/plan: the prompts are not the next 6 of the curriculum" in line for line in problems)


def test_a_what_if_run_has_the_same_plans_and_cannot_change_the_rewards(trained, tmp_path):
    job = copy_job(trained, tmp_path / "job")
    with job.prefect():
        from rheostat.flows.what_if import what_if

        run_flow(what_if("tiny@2", "faster", ["update.learning_rate=3e-3", *OURS], store=str(job.store), bound=1e-6))
    assert verify_run(str(job.store), "faster") == []
    length = "scoring.rewards=[{kind='target', target='tests.support.rewards:length', options={scale=0.01}}]"
    with pytest.raises(BadInput, match=r"rewards cannot change, because with rollout.curriculum"):
        request_fork(str(job.store), "tiny@2", "longer", overrides=[length, *OURS], is_what_if=True)


STALE = ("rollout.staleness=1",)
WAVES = (
    "rollout.dynamic={surplus='keep',max_extra_waves=2,margin=1}",
    "rollout.partial={tokens=18,over_dispatch=0}",
    "rollout.prompts=4",
    "data.options.train_problems=12",
)


@pytest.mark.thorough
@pytest.mark.parametrize(("settings", "lag"), [(STALE, 2), (WAVES, 1)], ids=["stale rollouts", "waves"])
def test_overlapping_iterations_and_waves_have_the_same_plans_after_an_interruption(
    tmp_path, prefect_api, settings, lag
):
    whole, job = (InProcessJob(tmp_path / name, prefect_api) for name in ("whole", "resumed"))
    whole.train(*FEW, CURRICULUM, *settings)
    run = run_of(whole)
    check_metrics(run, lag=lag)
    assert (max(len(Iteration(run, number).batches) for number in range(1, 6)) > 1) == (settings == WAVES)
    assert verify_run(str(whole.store), "tiny") == []
    copy_until(whole.run, job.run, iteration=4)
    job.train(*FEW, CURRICULUM, *settings)
    check_same_run(job.run, whole.run)


@pytest.mark.thorough
def test_a_file_of_a_mixture_that_is_never_solved_is_sampled_less(tmp_path, prefect_api):
    whole, job = (InProcessJob(tmp_path / name, prefect_api) for name in ("whole", "resumed"))
    sources = []
    for name, answer in (("even", "possible"), ("never", "impossible")):
        path = tmp_path / f"{name}.jsonl"
        write_json_lines(path, [{"prompt": f"{name} {number}", "answer": answer} for number in range(30)])
        sources.append(f'{{path="{path}",heldout_fraction=0.2}}')
    settings = (
        "iterations=5",
        "retention.keep_last=6",
        "data.kind=mixture",
        f"data.sources=[{','.join(sources)}]",
        "scoring.rewards=[{kind='target', target='tests.support.rewards:even_unless_impossible'}]",
        "rollout.curriculum={candidates=1, min_part_factor=0.1}",
    )
    whole.train(*settings)
    run = run_of(whole)
    shares = [run.require(f"it-000{number}/seal").metrics["plan/part_fraction_1"] for number in range(1, 6)]
    rates = [rate for number in range(1, 5) for rate in read_solve_rates(Iteration(run, number).credit).values()]
    assert any(0 < rate < 1 for rate in rates), "the other file can be learned"
    assert shares[0] == pytest.approx(1 / 2) and sum(shares[1:]) / 4 < 1 / 3
    assert verify_run(str(whole.store), "tiny") == []
    copy_until(whole.run, job.run, iteration=4)
    job.train(*settings)
    check_same_run(job.run, whole.run)
