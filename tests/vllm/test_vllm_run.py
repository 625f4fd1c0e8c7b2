"""Whole runs with vLLM as the engine of rollouts or judges: faults cost at most one shard, and no process stays."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.in_process import InProcessJob
from tests.support.jobs import KILL_SERVER, Fault, Job, demo, servers_of, wait_for
from tests.vllm.servers import PYTHON, PYTHON_SETTING

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SHAPE = ("policy.hidden_size=32", "policy.heads=1", "policy.kv_heads=1", "policy.context=96")
ENGINE = f"{{kind = 'vllm', cache_gib = 0.05{PYTHON_SETTING}}}"
ONE = (*SHAPE, f"rollout.engine={ENGINE}", "pools.workers=1", "evaluation.problems=4")
SIDE_BY_SIDE = ("placement.kind=fixed", "placement.rollout=0.5")  # one judge
MEAN, MOST = 1e-5, 1e-3
"""Differences of log-probs between vLLM and the trainer, both in float32."""


@dataclass(frozen=True)
class Shown:
    """Iterations of a run as `rheostat show` prints them, and the directory of the policy."""

    iterations: list[dict[str, object]]
    policy: Path

    def all(self, name: str) -> list[float]:
        return [float(str(iteration[name])) for iteration in self.iterations]


def read_show(job: Job) -> Shown:
    reported = json.loads(job.command("show", "--json").output)
    return Shown(reported["iterations"], Path(reported["policy"]))


def check_finished(job: Job, *, iterations: int) -> Shown:
    """Check that a run ended, passes `rheostat verify` and left no server."""
    verified = job.command("verify")
    assert verified.code == 0, verified.output
    left = servers_of(job.home)
    assert wait_for(lambda: not any(process.is_running() for process in left), seconds=30)
    assert servers_of(job.home) == []
    found = read_show(job)
    assert len(found.iterations) == iterations
    assert max(found.all("mismatch")) < MEAN and max(found.all("mismatch_max")) < MOST
    return found


def read_rollouts(job: Job) -> dict[str, bytes]:
    """Return the committed manifests of rollouts and their shards."""
    committed = {path: path.read_bytes() for path in job.run.glob("manifests/it-*/rollout/*.json")}
    keys = {shard["key"] for data in committed.values() for shard in json.loads(data)["shards"]}
    return {str(path): data for path, data in committed.items()} | {
        key: (job.run / key).read_bytes() for key in sorted(keys)
    }


def size_of(directory: Path) -> int:
    """Return the total bytes of the files in a policy's directory, except bundle.json."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.name != "bundle.json")


def repeated_work(job: Job) -> list[str]:
    """Return the rollout work that workers began more than once, over all starts of the run."""
    return [work for work, count in job.works().items() if work.startswith("generate") and count > 1]


def table(run: Path, key: str) -> pa.Table:
    """Return the only shard of a manifest."""
    manifest = json.loads((run / f"manifests/{key}.json").read_text())
    [shard] = manifest["shards"]
    return pa.ipc.open_file(pa.memory_map(str(run / shard["key"]))).read_all()


def test_a_kill_costs_at_most_the_shard_that_was_being_generated(tmp_path, prefect_api):
    job = Job(tmp_path, prefect_api, counts_works=True)
    faults = [
        Fault("rollout", "progress", r"generate .*\(iteration=1,", count=2, signal=KILL_SERVER),
        Fault("driver", "after", "manifests/it-0001/rollout/0001"),
    ]
    killed = job.train(*ONE, "iterations=2", faults=faults)
    assert (killed.code, job.struck()) == (-signal.SIGKILL, 2), killed.output
    assert wait_for(lambda: not servers_of(job.home), seconds=30), "servers end with the driver, whose workers own them"
    before = read_rollouts(job)
    assert before
    assert repeated_work(job) == [], "a server that dies is started again inside the piece of work"
    resumed = job.train(
        *ONE, "iterations=2", faults=[Fault("rollout", "progress", r"generate .*\(iteration=2,", count=2)]
    )
    assert resumed.code == 0, resumed.output
    found = check_finished(job, iterations=2)
    assert read_rollouts(job).items() >= before.items()
    assert len(repeated_work(job)) <= 2
    assert found.all("weights_bytes")[1] == size_of(found.policy), "the second iteration has weights of its own"


@pytest.mark.smoke
def test_adapters_are_served_on_their_base_which_is_loaded_once(tmp_path, prefect_api):
    job = Job(tmp_path, prefect_api)
    ended = job.train(*ONE, "iterations=2", "update.lora.rank=4", "update.learning_rate=1e-2")
    assert ended.code == 0, ended.output
    found = check_finished(job, iterations=2)
    base = Path(json.loads(job.command("show", "--json").output)["base"])
    first = [json.loads(path.read_text()) for path in job.run.glob("manifests/eval-0000/rollout/*.json")]
    assert sum(manifest["provenance"]["seconds"]["weights_bytes"] for manifest in first) == size_of(base)
    assert found.all("weights_bytes")[0] == 0, "it was evaluated before, with the same weights"
    assert found.all("weights_bytes")[1] == size_of(found.policy) < size_of(base)


SEEING = """
name = "tiny"
iterations = 2
[data]
kind = "target"
target = "pictures:PicturesData"
options = { train_problems = 6, heldout_problems = 8 }
[policy]
kind = "target"
target = "scratch_vision:VisionScratchPolicy"
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


def test_a_vision_language_policy_is_sampled_with_the_log_probs_of_its_trainer(tmp_path, prefect_api):
    """The first update changes the tower, and both iterations show all images: vLLM may reuse no image features."""
    job = Job(tmp_path, prefect_api, document=SEEING)
    ended = job.train(f"rollout.engine={ENGINE}", "pools.workers=1")
    assert ended.code == 0, ended.output
    found = check_finished(job, iterations=2)
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


def test_episodes_of_hostile_environments_are_trained_as_sampled_even_if_a_server_is_killed(tmp_path, prefect_api):
    job = Job(tmp_path, prefect_api)
    fault = Fault("rollout", "progress", r"generate .*\(iteration=1,", count=20, signal=KILL_SERVER)
    ended = job.train(*ONE, *EPISODES, "iterations=2", faults=[fault])
    assert ended.code == 0, ended.output
    assert job.struck() == 1
    check_finished(job, iterations=2)
    shards = [path.stem for path in (job.run / "manifests/it-0001/rollout").iterdir()]
    rows = [row for shard in shards for row in table(job.run, f"it-0001/rollout/{shard}").to_pylist()]
    failed = [row["turns"][-1]["error"] for row in rows if row["finish_reason"] == "failed"]
    assert len({*failed}) > 3, "they hang, crash, raise and lie"
    assert any(len(row["turns"]) == 3 for row in rows if row["finish_reason"] != "failed")


def judged(engine: str) -> str:
    shape = "{kind = 'scratch', hidden_size = 32, intermediate_size = 32, heads = 1, kv_heads = 1, context = 192}"
    model = f"{{kind = 'trained', warmup = {{steps = 30}}, engine = {engine}, shape = {shape}}}"
    even = "{kind = 'target', target = 'tests.support.rewards:even', weight = 0.5}"
    return f"scoring.rewards=[{even}, {{kind = 'judge', model = {model}}}]"


def test_a_judge_on_vllm_gives_the_verdicts_of_transformers(tmp_path, prefect_api):
    small = (*SHAPE, *SIDE_BY_SIDE, "iterations=1", "evaluation.problems=4")
    job, other = Job(tmp_path / "vllm", prefect_api), InProcessJob(tmp_path / "transformers", prefect_api)
    ended = job.train(judged(ENGINE), *small)
    assert ended.code == 0, ended.output
    other.train(judged("{kind = 'transformers'}"), *small)
    check_finished(job, iterations=1)
    shards = sorted(path.stem for path in (job.run / "manifests/it-0001/judge-judge").glob("*.json"))
    assert len(shards) == 3
    for shard in shards:
        reported, expected = (table(run, f"it-0001/judge-judge/{shard}") for run in (job.run, other.run))
        assert reported.equals(expected)
        assert reported["value"].null_count < reported.num_rows


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_learns_with_vllm_as_with_transformers(tmp_path, seed):
    own = () if PYTHON is None else (f"rollout.engine.python={PYTHON}",)
    engines = {"vllm": own, "plugin": ("rollout.engine.kind=transformers",)}
    for name, overrides in engines.items():
        (tmp_path / name).mkdir()
        reported = demo(tmp_path / name, f"seed={seed}", *overrides, config="configs/vllm.toml")
        assert reported["before"]["high"] < 0.2
        assert reported["after"]["mean"] > 0.9, name
