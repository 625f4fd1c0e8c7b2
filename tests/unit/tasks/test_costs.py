"""Costs of roles, compared with values computed by hand, and limits of budgets."""

from types import SimpleNamespace

import pytest

from rheostat.infra.costs import Account, Cost, total
from rheostat.infra.store.bundles import BundleRef
from rheostat.infra.store.manifests import Manifest, decode_manifest, provenance_here
from rheostat.infra.store.shards import ShardRef
from rheostat.models.config.budget import BudgetConfig
from rheostat.tasks.costs import Reservation, compute_costs
from tests.support.configurations import accepted

JUDGES = (
    "scoring.rewards=[{kind = 'judge', name = 'here', slots = 2, model = {kind = 'trained'}},"
    " {kind = 'judge', name = 'there', model = {kind = 'endpoint', base_url = 'https://judge.example.com/v1',"
    " allowed_hosts = ['judge.example.com'], model = 'judge'}, verdict = {kind = 'score'}}]"
)
POOLS = ("pools.workers=4", "pools.scoring_workers=3", "pools.update_ranks=2")
GPUS = ("pools.gpus_per_worker=0.5", "pools.gpus_per_update_rank=1")
PRICES = (
    "budget.prices.per_worker_hour=3.6",
    "budget.prices.per_gpu_hour=36",
    "budget.prices.judges.there.per_thousand_calls=500",
    "budget.prices.judges.there.per_million_tokens_written=1000",
)


def build_manifest(seconds, size=0, *, bundles=None, told=None, **metrics):
    """Build the manifest of work that took this number of seconds, with a shard of a size."""
    shards = (ShardRef(key="shards/x.arrow", bytes=size, rows=1, digest="x"),) if size else ()
    provenance = provenance_here(seconds={"worker": seconds, **(told or {})})
    return Manifest(key="a/b", shards=shards, bundles=bundles or {}, metrics=metrics, provenance=provenance)


def bundle(key, size):
    return BundleRef(key=key, digest=key, bytes=size)


SHARES_NOTHING = SimpleNamespace(inherits=lambda key: False)
"""Run that is no fork."""


class OneBatch:
    """Stages of one iteration."""

    run = SHARES_NOTHING

    def stage_manifests(self, name):
        stages = {
            "rollout": [
                build_manifest(3, 100, tokens=30, prompt_tokens=8),
                build_manifest(1, 50, tokens=12, prompt_tokens=4),
            ],
            "scoring": [build_manifest(0.5, 10), build_manifest(0.5, 10)],
            "judge-here": [build_manifest(2, 20, tokens=7, sequences=4)],
            "judge-there": [build_manifest(6, 20, told={"read_tokens": 90.0}, tokens=5, sequences=4)],
        }
        return stages[name]


@pytest.fixture(scope="module")
def costs():
    """Costs of ten seconds of four slots, two pools of three processes, and two ranks."""
    open_run = SimpleNamespace(settings=accepted(JUDGES, *POOLS, *GPUS, *PRICES))
    update = build_manifest(
        2, bundles={"weights": bundle("new", 1000), "base": bundle("old", 5000)}, tokens=42.0, steps=2.0
    )
    return compute_costs(
        open_run,
        [OneBatch()],
        Reservation(seconds=10, slots=4),
        credit=[build_manifest(1, 30, tokens=99)],
        trained=[build_manifest(3, 7, tokens=42), update],
        known={"old"},
    )


def test_generation_shares_the_slots_with_a_judge_in_proportion_to_their_work(costs):
    # 4 slots of 10 s; 3 + 1 s of generation, and 2 s of a judge on two slots: half each.
    assert costs["rollout"].busy_seconds == 4
    assert costs["rollout"].worker_seconds == pytest.approx(20)
    # The other half, and two pools of three processes: for rules and credit, and before the endpoint.
    assert costs["scoring"].worker_seconds == pytest.approx(20 + 2 * 3 * 10)
    assert costs["scoring"].busy_seconds == pytest.approx(2 * 2 + 6 + 0.5 + 0.5 + 1)
    assert costs["update"].worker_seconds == pytest.approx(20)
    assert costs["update"].busy_seconds == pytest.approx(2 * (3 + 2))


def test_gpu_seconds_count_reserved_workers_and_bytes_count_new_shards_and_bundles(costs):
    assert [costs[role].bytes for role in ("rollout", "scoring", "update")] == [150, 90, 1007]
    assert [costs[role].gpu_seconds for role in ("rollout", "scoring", "update")] == pytest.approx([10, 10, 20])


def test_prompt_completion_and_trained_tokens_are_counted_by_role(costs):
    rollout, scoring, update = costs["rollout"], costs["scoring"], costs["update"]
    assert (rollout.prompt_tokens, rollout.written_tokens, rollout.learnt_tokens) == (12, 42, 0)
    # Of a judge here only what it writes is known, and where it chooses among given answers it writes nothing.
    assert (scoring.prompt_tokens, scoring.written_tokens, scoring.learnt_tokens) == (90, 5, 0)
    assert (update.prompt_tokens, update.written_tokens, update.learnt_tokens) == (0, 0, 42)


def test_prices_include_reserved_workers_gpus_and_a_judge_behind_an_endpoint(costs):
    assert costs["scoring"].judge_calls == 8
    assert costs["rollout"].price == pytest.approx(20 * 3.6 / 3600 + 10 * 36 / 3600)
    judge = 4 * 500 / 1000 + 5 * 1000 / 1e6
    assert costs["scoring"].price == pytest.approx(80 * 3.6 / 3600 + 10 * 36 / 3600 + judge)


def test_work_done_before_a_kill_counts_as_reserved_time():
    open_run = SimpleNamespace(settings=accepted())
    manifests = [build_manifest(3, 100, tokens=1, prompt_tokens=1)]
    batch = SimpleNamespace(stage_manifests=lambda name: manifests, run=SHARES_NOTHING)
    costs = compute_costs(open_run, [batch], Reservation(), trained=[build_manifest(2)])
    assert [costs[role].worker_seconds for role in ("rollout", "scoring", "update")] == [3, 3, 2]


def test_costs_are_not_in_the_digest_of_a_manifest_and_budgets_not_in_the_identity_of_a_run():
    assert accepted("budget.tokens=5", "budget.prices.per_worker_hour=1").fingerprint() == accepted().fingerprint()
    sealed = Manifest(key="it-0001/seal", provenance=provenance_here(costs={"rollout": Cost(written_tokens=3)}))
    assert decode_manifest(sealed.encode(), key="it-0001/seal").provenance.costs["rollout"].written_tokens == 3
    assert sealed.digest == Manifest(key="it-0001/seal").digest


def test_an_account_sums_the_costs_of_all_roles():
    account = Account()
    account.add({"rollout": Cost(written_tokens=2, price=0.5), "update": Cost(learnt_tokens=2)})
    account.add({"rollout": Cost(written_tokens=3, price=0.25)})
    assert account.spent == total([Cost(written_tokens=5, learnt_tokens=2, price=0.75)])


@pytest.mark.parametrize(
    ("limits", "spent", "said"),
    [
        ({"tokens": 10}, Cost(prompt_tokens=4, written_tokens=3, learnt_tokens=2), None),
        (
            {"tokens": 10},
            Cost(prompt_tokens=4, written_tokens=3, learnt_tokens=3),
            "budget.tokens is 10, and the run has used 10",
        ),
        ({"worker_hours": 0.5}, Cost(worker_seconds=1800), "budget.worker_hours is 0.5, and the run has used 0.5"),
        ({"gpu_hours": 2}, Cost(gpu_seconds=9000), "budget.gpu_hours is 2.0, and the run has used 2.5"),
        (
            {"judge_calls": 3, "bytes": 5},
            Cost(judge_calls=2, bytes=1234),
            "budget.bytes is 5, and the run has used 1,234",
        ),
        ({"price": 0.1}, Cost(price=0.25), "budget.price is 0.1, and the run has used 0.25"),
        ({}, Cost(price=1e9, bytes=10**15), None),
    ],
)
def test_a_reached_limit_is_named_with_the_spent_amount(limits, spent, said):
    assert BudgetConfig(**limits).find_spent_limit(spent) == said
