"""Costs of runs, counted a second time from their files, and runs that end when their budget is spent."""

import json

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.errors import BudgetSpent
from tests.support.in_process import InProcessJob
from tests.support.jobs import manifest_of, manifests_of
from tests.support.stored_runs import rows_of
from tests.support.whole_runs import check_same_run, read_families

pytestmark = pytest.mark.timeout(1200)

ROLES = ("rollout", "scoring", "update")


def costs_in(job, key):
    """Return the costs of a manifest by role."""
    return manifest_of(job.run, key)["provenance"]["costs"]


def named_in(job, key):
    """Return the shards and bundles that a manifest names."""
    manifest = manifest_of(job.run, key)
    return [*manifest["shards"], *manifest["bundles"].values()]


def files_below(path):
    """Return the file of a shard, or the files of a bundle except its table of contents."""
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.name != "bundle.json"]


def tokens_until(job, *keys):
    """Return the tokens of all roles in these iterations and evaluations."""
    kinds = ("prompt_tokens", "written_tokens", "learnt_tokens")
    return sum(costs_in(job, key)[role][kind] for key in keys for role in ROLES for kind in kinds)


AFTER_ONE = ("eval-0000/summary", "it-0001/seal")
AFTER_THREE = (*AFTER_ONE, "it-0002/seal", "it-0003/seal")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_token_costs_equal_the_tokens_in_the_shards(reference, number):
    costs, shards = costs_in(reference, f"it-{number:04d}/seal"), range(3)
    rollouts = rows_of(reference, *(f"it-{number:04d}/rollout/{shard:04d}" for shard in shards))
    samples = rows_of(reference, f"it-{number:04d}/credit")
    assert len(rollouts) == 24, "six prompts, four completions each"
    read = {row["prompt_row"]: len(row["prompt_tokens"]) for row in rollouts}
    assert costs["rollout"]["prompt_tokens"] == sum(read.values()), "a prompt is read once for its group"
    assert costs["rollout"]["written_tokens"] == sum(len(row["completion_tokens"]) for row in rollouts)
    assert costs["update"]["learnt_tokens"] == sum(len(row["advantages"]) for row in samples) > 0


def test_byte_costs_equal_the_sizes_of_the_files(reference):
    costs, run = costs_in(reference, "it-0003/seal"), reference.run
    stages = {
        "rollout": [f"it-0003/rollout/{shard:04d}" for shard in range(3)],
        "scoring": [*(f"it-0003/scoring/{shard:04d}" for shard in range(3)), "it-0003/credit"],
        "update": ["it-0003/update"],
    }
    for role, keys in stages.items():
        files = [file for key in keys for ref in named_in(reference, key) for file in files_below(run / ref["key"])]
        assert costs[role]["bytes"] == sum(file.stat().st_size for file in files) > 0


def test_workers_cost_the_whole_time_that_they_are_reserved(reference):
    for key in (*AFTER_THREE, "eval-0003/summary"):
        costs = costs_in(reference, key)
        held = costs["update"]["worker_seconds"]  # of its one rank
        assert costs["rollout"]["worker_seconds"] == pytest.approx(2 * held), "two slots"
        assert costs["scoring"]["worker_seconds"] == pytest.approx(held), "one process beside them"
        assert 0 < costs["rollout"]["busy_seconds"] <= costs["rollout"]["worker_seconds"]


def test_show_prints_the_costs_of_each_role_and_their_sum(reference):
    lines = reference.command("show").output.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("cost of"))
    assert [line.split()[0] for line in lines[begin + 1 : begin + 5]] == [*ROLES, "total"]
    told = json.loads(reference.command("show", "--json").output)
    everything = (*AFTER_THREE, "eval-0003/summary")
    whole = sum(costs_in(reference, key)["rollout"]["written_tokens"] for key in everything)
    assert told["costs"]["rollout"]["written_tokens"] == whole
    assert f"{whole:,}" in lines[begin + 1]
    assert told["iterations"][1]["costs"] == costs_in(reference, "it-0002/seal")


@pytest.mark.system
def test_a_spent_budget_ends_the_run_and_a_larger_budget_continues_it(reference, tmp_path, prefect_api, capsys):
    job, limit = InProcessJob(tmp_path, prefect_api, counts_works=True), tokens_until(reference, *AFTER_ONE)
    with pytest.raises(
        BudgetSpent, match=rf"after iteration 1 of 3: budget.tokens is {limit:,}, and the run has used {limit:,}\."
    ):
        job.train(f"budget.tokens={limit}")
    assert "it-0001/seal" in manifests_of(job.run)
    assert not [key for key in manifests_of(job.run) if key.startswith("it-0002")], "nothing of the next was begun"
    plots = [path.name for path in (job.run / "report").glob("*.png")]
    assert plots == ["learning-curve-0001.png"], "what ends before its end leaves how far it came"
    before = job.works()
    with job.prefect():
        given = ["train", str(tmp_path / "tiny.toml"), "pools.cluster=threads", f"budget.tokens={limit}"]
        assert main([*given, "--store", str(job.store)]) == 3
    assert "budget.tokens" in capsys.readouterr().err
    assert job.works() == before, "a budget that is spent has no worker do anything"
    with pytest.raises(BudgetSpent, match="after iteration 2 of 3"):
        job.train(f"budget.tokens={limit + 1}")
    job.train(f"budget.tokens={tokens_until(reference, *AFTER_THREE)}")  # reached, when no iteration is left
    check_same_run(job.run, reference.run)


@pytest.mark.system
def test_rollouts_generated_ahead_of_a_spent_budget_are_used_by_the_run_that_continues(
    undisturbed, tmp_path, together, prefect_api
):
    whole, job = undisturbed("stale rollouts"), InProcessJob(tmp_path, prefect_api, True)
    stale = read_families()["stale rollouts"].settings(together)
    with pytest.raises(BudgetSpent, match="after iteration 1 of 3"):
        job.train(*stale, f"budget.tokens={tokens_until(whole, *AFTER_ONE)}")
    ahead = {f"it-0002/{stage}/{shard:04d}" for stage in ("rollout", "scoring") for shard in range(3)}
    assert ahead < manifests_of(job.run).keys() and "it-0002/credit" not in manifests_of(job.run)
    job.train(*stale)
    check_same_run(job.run, whole.run)
    assert max(job.works().values()) == 1, "no work was done twice"
