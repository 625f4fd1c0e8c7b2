"""Whole runs that vLLM generates or judges: faults cost a shard at most, and no process of it stays."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.support.in_process import InProcessJob
from tests.support.jobs import KILL_SERVER, Fault, Job, demo, servers_of, wait_for

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SHAPE = ("policy.hidden_size=32", "policy.heads=1", "policy.kv_heads=1", "policy.context=96")
GIVEN = os.environ.get("VLLM_PYTHON")
PLACE = f", python = '{GIVEN}'" if GIVEN else ""
ENGINE = f"{{kind = 'vllm', cache_gib = 0.05{PLACE}}}"
ONE = (*SHAPE, f"rollout.engine={ENGINE}", "pools.workers=1", "evaluation.problems=4")
SIDE_BY_SIDE = ("placement.kind=fixed", "placement.rollout=0.5")  # one judge
MEAN, MOST = 1e-5, 1e-3
"""Differences of log-probs between vLLM and the trainer, both in float32."""


@dataclass(frozen=True)
class Shown:
    """What a run tells of its iterations."""

    iterations: list[dict[str, object]]
    policy: Path

    def all(self, name: str) -> list[float]:
        return [float(str(iteration[name])) for iteration in self.iterations]


def shown(job: Job) -> Shown:
    told = json.loads(job.command("show", "--json").output)
    return Shown(told["iterations"], Path(told["policy"]))


def whole(job: Job, *, iterations: int) -> Shown:
    """Check that a run came to its end, keeps every promise, and left no server."""
    verified = job.command("verify")
    assert verified.code == 0, verified.output
    left = servers_of(job.home)
    assert wait_for(lambda: not any(process.is_running() for process in left), seconds=30)
    assert servers_of(job.home) == []
    found = shown(job)
    assert len(found.iterations) == iterations
    assert max(found.all("mismatch")) < MEAN and max(found.all("mismatch_max")) < MOST
    return found


def finished(job: Job) -> dict[str, bytes]:
    """Manifests of the rollout shards that are committed, and the shards."""
    committed = {path: path.read_bytes() for path in job.run.glob("manifests/it-*/rollout/*.json")}
    keys = {shard["key"] for data in committed.values() for shard in json.loads(data)["shards"]}
    return {str(path): data for path, data in committed.items()} | {
        key: (job.run / key).read_bytes() for key in sorted(keys)
    }


def size_of(directory: Path) -> int:
    """Bytes of the files that a policy's directory lists."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.name != "bundle.json")


def begun_twice(job: Job) -> list[str]:
    """Pieces of rollout work that workers began more than once, over all starts."""
    return [work for work, count in job.works().items() if work.startswith("generate") and count > 1]


def table(run: Path, key: str) -> pa.Table:
    """The rows of a manifest's only shard."""
    manifest = json.loads((run / f"manifests/{key}.json").read_text())
    [shard] = manifest["shards"]
    return pa.ipc.open_file(pa.memory_map(str(run / shard["key"]))).read_all()


def test_no_kill_costs_more_than_the_shard_that_was_under_way(tmp_path, prefect_api):
    job = Job(tmp_path, prefect_api, counts_works=True)
    faults = [
        Fault("rollout", "progress", r"generate .*\(iteration=1,", count=2, signal=KILL_SERVER),
        Fault("driver", "after", "manifests/it-0001/rollout/0001"),
    ]
    killed = job.train(*ONE, "iterations=2", faults=faults)
    assert (killed.code, job.struck()) == (-signal.SIGKILL, 2), killed.output
    assert wait_for(lambda: not servers_of(job.home), seconds=30), "servers end with the driver, whose workers own them"
    before = finished(job)
    assert before
    assert begun_twice(job) == [], "a server that dies is started again inside the piece of work"
    resumed = job.train(
        *ONE, "iterations=2", faults=[Fault("rollout", "progress", r"generate .*\(iteration=2,", count=2)]
    )
    assert resumed.code == 0, resumed.output
    found = whole(job, iterations=2)
    assert finished(job).items() >= before.items()
    assert len(begun_twice(job)) <= 2
    assert found.all("weights_bytes")[1] == size_of(found.policy), "the second iteration has weights of its own"


def test_adapters_are_served_beside_their_base_which_moves_once(tmp_path, prefect_api):
    job = Job(tmp_path, prefect_api)
    ended = job.train(*ONE, "iterations=2", "update.lora.rank=4", "update.learning_rate=1e-2")
    assert ended.code == 0, ended.output
    found = whole(job, iterations=2)
    base = Path(json.loads(job.command("show", "--json").output)["base"])
    first = [json.loads(path.read_text()) for path in job.run.glob("manifests/eval-0000/rollout/*.json")]
    assert sum(manifest["provenance"]["seconds"]["weights_bytes"] for manifest in first) == size_of(base)
    assert found.all("weights_bytes")[0] == 0, "it was evaluated before, with the same weights"
    assert found.all("weights_bytes")[1] == size_of(found.policy) < size_of(base)


SEEING = """
name = "tiny"
iterations = 2
[data]
kind = "pictures"
train_problems = 6
heldout_problems = 8
[policy]
kind = "seeing_scratch"
[warmup]
steps = 10
[rollout]
prompts = 6
group_size = 4
shard_prompts = 2
[rollout.sampling]
max_new_tokens = 24
[scoring]
rewards = [{kind = "target", target = "tests.support.rewards:even"}]
[update]
learning_rate = 1e-3
minibatches = 2
[evaluation]
problems = 4
"""


def test_a_policy_that_sees_is_sampled_as_it_is_trained(tmp_path, prefect_api):
    """Its tower moves in the first update, and both iterations show all pictures: none may be remembered."""
    job = Job(tmp_path, prefect_api, document=SEEING)
    ended = job.train(f"rollout.engine={ENGINE}", "pools.workers=1")
    assert ended.code == 0, ended.output
    found = whole(job, iterations=2)
    assert found.all("weights_bytes")[1] == size_of(found.policy)
    rollouts = table(job.run, "it-0002/rollout/0000")
    assert min(map(len, rollouts["images"].to_pylist())) == 1


EPISODES = (
    "rollout.environment.kind=target",
    "rollout.environment.target=tests.support.games:Hostile",
    "rollout.environment.prompts=text",
    "rollout.environment.parser=none",
    "rollout.environment.turn_tokens=8",
    "rollout.environment.step_seconds=2",
    "rollout.environment.processes=2",
    'rollout.sampling.stop=["1", " ", "e", "a"]',
    "rollout.group_size=8",
    "scoring.max_missing=1.0",
)


def test_episodes_of_hostile_environments_are_learnt_as_they_were_sampled_also_where_a_server_was_killed(
    tmp_path, prefect_api
):
    job = Job(tmp_path, prefect_api)
    fault = Fault("rollout", "progress", r"generate .*\(iteration=1,", count=20, signal=KILL_SERVER)
    ended = job.train(*ONE, *EPISODES, "iterations=2", faults=[fault])
    assert ended.code == 0, ended.output
    assert job.struck() == 1
    whole(job, iterations=2)
    rows = [row for path in (job.run / "manifests/it-0001/rollout").iterdir() for row in rows_of(job, path.stem)]
    failed = [row["turns"][-1]["error"] for row in rows if row["finish_reason"] == "failed"]
    assert len({*failed}) > 3, "they hang, crash, raise and lie"
    assert any(len(row["turns"]) == 3 for row in rows if row["finish_reason"] != "failed")


def rows_of(job: Job, shard: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = table(job.run, f"it-0001/rollout/{shard}").to_pylist()
    return rows


def judged(engine: str) -> str:
    shape = "{kind = 'scratch', hidden_size = 32, intermediate_size = 32, heads = 1, kv_heads = 1, context = 192}"
    model = f"{{kind = 'trained', warmup = {{steps = 30}}, engine = {engine}, shape = {shape}}}"
    even = "{kind = 'target', target = 'tests.support.rewards:even', weight = 0.5}"
    return f"scoring.rewards=[{even}, {{kind = 'judge', model = {model}}}]"


def test_a_judge_on_vllm_gives_the_verdicts_that_it_gives_on_transformers(tmp_path, prefect_api):
    small = (*SHAPE, *SIDE_BY_SIDE, "iterations=1", "evaluation.problems=4")
    job, other = Job(tmp_path / "vllm", prefect_api), InProcessJob(tmp_path / "transformers", prefect_api)
    ended = job.train(judged(ENGINE), *small)
    assert ended.code == 0, ended.output
    other.train(judged("{kind = 'transformers'}"), *small)
    whole(job, iterations=1)
    shards = sorted(path.stem for path in (job.run / "manifests/it-0001/judge-judge").glob("*.json"))
    assert len(shards) == 3
    for shard in shards:
        told, expected = (table(run, f"it-0001/judge-judge/{shard}") for run in (job.run, other.run))
        assert told.equals(expected)
        assert told["value"].null_count < told.num_rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_learns_with_vllm_as_with_transformers(tmp_path, seed):
    own = () if GIVEN is None else (f"rollout.engine.python={GIVEN}",)
    engines = {"vllm": own, "plugin": ("rollout.engine.kind=transformers",)}
    for name, overrides in engines.items():
        (tmp_path / name).mkdir()
        told = demo(tmp_path / name, f"seed={seed}", *overrides, config="configs/vllm.toml")
        assert told["before"]["high"] < 0.2
        assert told["after"]["mean"] > 0.9, name
