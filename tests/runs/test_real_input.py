"""Real data and policies through whole jobs: files of every format, chats, model directories, GSM8K."""

import json
import os
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.data import FileData
from rheostat.models.data.problems import Message, load_problems
from rheostat.tasks.config.run import load_config
from tests.support.in_process import InProcessJob
from tests.support.jobs import AUTH, RHEOSTAT, ROOT, SEARCH_PATH
from tests.support.policies import write_policy

GSM8K = ROOT / "configs" / "gsm8k.toml"

QUESTIONS = [f"Ana has {n} pens and buys {n % 7}. How many?" for n in range(40)]
ANSWERS = [f"{n}+{n % 7}={n + n % 7}\n#### {n + n % 7}" for n in range(40)]
CHATS = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in QUESTIONS]


def write_table(path: Path, columns: dict[str, list[object]]) -> None:
    """Write the same columns in the format of the suffix."""
    table = pa.table(columns)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
        case ".parquet":
            pq.write_table(table, path)
        case ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)


def rheostat(*arguments: str, api: str, home: Path, cwd: Path) -> str:
    """Run a command that must succeed, and return its output."""
    environment = {**os.environ, "PREFECT_API_URL": api, **AUTH, "PREFECT_HOME": str(home / "prefect")}
    environment |= {"PYTHONPATH": SEARCH_PATH}
    done = subprocess.run([RHEOSTAT, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".arrow"])
@pytest.mark.parametrize("style", ["plain", "chat"])
def test_every_format_gives_the_same_problems_from_columns_of_any_name(suffix, style, tmp_path):
    path = tmp_path / f"problems{suffix}"
    write_table(path, {"extra": [*range(40)], "ask": QUESTIONS if style == "plain" else CHATS, "solution": ANSWERS})
    data = FileData(path=path, prompt_column="ask", answer_column="solution", template="Q: {prompt} A: ")
    train, heldout = (load_problems(data, split, 0) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == 40
    first = (
        f"Q: {QUESTIONS[0]} A: "
        if style == "plain"
        else (Message("system", "Be brief."), Message("user", QUESTIONS[0]))
    )
    problem = next(problem for problem in (*train, *heldout) if problem.prompt == first)
    assert problem.answer == ANSWERS[0]


def test_every_problem_of_the_bundled_gsm8k_is_read_by_its_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(GSM8K)
    train, heldout = (load_problems(config.data, split, 0) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (192, 64)
    assert all("#### " in problem.answer for problem in (*train, *heldout))
    assert train[0].prompt.startswith("Question: Mr. Sanchez found out that 40% of his Grade 5 ")


@pytest.mark.system
def test_a_model_directory_learns_from_chats_in_parquet(tmp_path, prefect_api, monkeypatch, capsys):
    write_table(tmp_path / "chats.parquet", {"messages": CHATS, "solution": ANSWERS})
    write_policy(tmp_path / "model", "qwen3")
    (tmp_path / "job.toml").write_text("""
name = "chats"
iterations = 1
data = {kind = "file", path = "chats.parquet", prompt_column = "messages", answer_column = "solution"}
policy = {kind = "directory", path = "model"}
rollout = {prompts = 4, group_size = 2, shard_prompts = 4, sampling = {max_new_tokens = 16}}
scoring.rewards = [{kind = "math"}, {kind = "target", target = "tests.support.rewards:even", weight = 0.5}]
pools.workers = 1
evaluation.problems = 1
""")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", SEARCH_PATH)  # rewards of tests are not installed
    with InProcessJob(tmp_path, prefect_api).prefect():
        assert main(["train", "job.toml", "pools.cluster=threads", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["iterations"], summary["after"]["problems"]) == (1, 1)
    assert main(["verify", "chats"]) == 0
    assert capsys.readouterr().out == "run chats: every digest and every invariant holds\n"
    run = open_run(str(tmp_path / "runs"), "chats")
    [rollouts] = run.manifests("it-0001/rollout/")
    prompts = read_shard(run.store, rollouts.shards[0], columns=["prompt"])["prompt"].to_pylist()
    assert all(text.startswith("system: Be brief.\nuser: Ana has ") for text in prompts)
    assert all(text.endswith("How many?\nassistant: ") for text in prompts)
    config = json.loads((Path(summary["policy"]) / "config.json").read_text())
    assert config["model_type"] == "qwen3"


@pytest.mark.slow
@pytest.mark.parametrize("reward", ["numeric", "math"])
def test_gsm8k_trains_a_small_random_model_for_three_iterations(reward, tmp_path, prefect_api):
    overrides = [
        "iterations=3", "warmup.steps=20", "rollout.prompts=8", "rollout.group_size=4", "rollout.shard_prompts=4",
        "rollout.sampling.max_new_tokens=48", "evaluation.problems=32", f'scoring.rewards=[{{kind="{reward}"}}]',
    ]  # fmt: skip
    store = ["--store", str(tmp_path)]
    trained = rheostat("train", str(GSM8K), *overrides, *store, "--json", api=prefect_api, home=tmp_path, cwd=ROOT)
    assert json.loads(trained)["iterations"] == 3
    verified = rheostat("verify", "gsm8k", *store, api=prefect_api, home=tmp_path, cwd=ROOT)
    assert verified == "run gsm8k: every digest and every invariant holds\n"
    run = open_run(str(tmp_path), "gsm8k")
    rows = {split: run.find(f"prompts/{split}").shards[0].rows for split in ("train", "heldout")}
    assert rows == {"train": 192, "heldout": 64}
    shown = json.loads(rheostat("rollouts", "gsm8k", "--json", *store, api=prefect_api, home=tmp_path, cwd=ROOT))
    assert all(sample["prompt"].startswith("Question: ") for sample in shown)
    assert all(sample["reward"] is not None for sample in shown)
