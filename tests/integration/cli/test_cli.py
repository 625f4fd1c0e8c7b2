"""The `rheostat` command on a finished run: what each command prints, and how it answers a slip."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pyarrow.dataset as ds
import pytest

from flows.cli.app import main
from flows.cli.prefect_api import run_flow
from infra.errors import ApiFailed, Damaged
from infra.store.checksums import seal
from infra.store.runs import create_run
from infra.terminal import WIDTH
from tasks.views.runs import RunDescription
from tests.support.environments import leave_vllm
from tests.support.jobs import RHEOSTAT, ROOT, files_of


@pytest.fixture
def ask(capsys, reference):
    """Give a command about the finished run; return exit code, stdout and stderr."""

    def give(*arguments: str, store: Path = reference.store) -> tuple[int, str, str]:
        code = main([*arguments, "--store", str(store)])
        return (code, *capsys.readouterr())

    return give


@pytest.fixture
def copied(reference, tmp_path):
    """A store with a copy of the finished run, to be damaged."""
    shutil.copytree(reference.run, tmp_path / "store" / "tiny")
    return tmp_path / "store"


def test_the_version_is_the_packages_and_names_the_commit(capsys):
    assert main(["--version"]) == 0
    commit = r"( \([0-9a-f]{12}(-dirty)?\))?"  # where git, or what installed it, knows
    assert re.fullmatch(rf"rheostat \d+\.\d+\.\d+{commit}\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "expected a command, such as `rheostat train configs/demo.toml`"),
        (["trian", "x.toml"], "command 'trian': expected init, train, .*; did you mean 'train'?"),
        (["--store", "x", "runs"], "unrecognized arguments: --store (see `rheostat --help`)"),
        (["engine"], "expected an action, such as `rheostat engine install vllm`"),
        (["engine", "instal", "vllm"], "command 'instal': expected install, .*; did you mean 'install'?"),
        (["engine", "install", "vlm"], "ENGINE 'vlm': expected vllm; did you mean 'vllm'?"),
        (["export-policy", "a"], "the following arguments are required: --to (see `rheostat export-policy --help`)"),
        (["show", "a", "--store"], "--store: expected a value (see `rheostat show --help`)"),
        (["show", "a", "--json=x"], "--json 'x': expected no value"),
        (["train"], "the following arguments are required: CONFIG (see `rheostat train --help`)"),
        (["show"], "the following arguments are required: RUN"),
        (["show", "a", "b"], "unrecognized arguments: b"),
        (["train", "configs/demo.toml", "--dryrun"], "unrecognized arguments: --dryrun; did you mean '--dry-run'?"),
        (["rollouts", "a", "--sort", "rewards"], "--sort 'rewards': expected position, .*; did you mean 'reward'?"),
        (["rollouts", "a", "--limit", "0"], "--limit 0: expected at least 1"),
        (["rollouts", "a", "--iteration", "x"], "--iteration 'x': expected a whole number"),
        (["train", "seed=1", "configs/demo.toml"], "the configuration comes first"),
        (["evaluate", "configs"], "policy configs does not lie in a run: name its problems with --config CONFIG"),
        (["show", "a", "--store", "pyproject.toml"], "pyproject.toml': expected a directory, found a file"),
        (["show", "a", "--store", "gs://b"], "expected a path, file:// or s3://bucket/prefix"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_in_one_line(arguments, expected, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rheostat: ")
    assert err.count("\n") == 1
    assert re.search(re.escape(expected).replace(r"\.\*", ".*"), err), err


def test_overrides_may_follow_options(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = ROOT / "configs" / "demo.toml"
    assert main(["train", str(config), "--run", "other", "evaluation.problems=257", "seed=-1"]) == 2
    assert "seed: expected greater than or equal to 0, got -1" in capsys.readouterr().err


def test_runs_lists_what_lies_in_a_store(ask, copied):
    code, out, _ = ask("runs", "--json", store=copied)
    assert code == 0
    [run] = json.loads(out)
    assert (run["run"], run["iterations"], run["damage"]) == ("tiny", 3, None)
    assert 0 <= run["before"] <= 1
    assert 0 <= run["after"] <= 1
    (copied / "tiny" / "run.json").write_text("{}")
    code, out, _ = ask("runs", store=copied)
    assert code == 0
    assert re.search(r"^tiny .*damaged: see `rheostat verify`", out, re.MULTILINE)
    assert ask("runs", store=copied / "nowhere") == (0, f"no runs in {(copied / 'nowhere').as_uri()}\n", "")


def test_show_tells_metrics_digests_and_seconds_of_every_iteration(ask):
    code, out, _ = ask("show", "tiny", "--json")
    assert code == 0
    described = RunDescription.model_validate_json(out)
    assert [report.iteration for report in described.iterations] == [1, 2, 3]
    assert [accuracy.number for accuracy in described.evaluations] == [0, 3]
    assert described.engines == {"rollout": ["transformers"]}, "as every shard's metadata says"
    for report in described.iterations:
        assert re.fullmatch(r"[0-9a-f]{64}", report.policy)
        waits = {"rollout", "scoring_after", "estimates", "credit", "update", "between"}
        assert set(report.seconds) == {"scoring", "total", *waits}
        assert sum(report.stages.values()) == pytest.approx(report.seconds["total"]), "nothing of it has no name"
        assert report.terms == {"target": report.accuracy}
        assert report.truncated is not None and report.truncated > 0.5, "a policy that has learnt nothing does not end"
        assert report.reward_std is not None and report.informative is not None
        assert report.entropy is not None and report.grad_norm is not None and report.grad_norm > 0
        assert (report.clip_low, report.clip_high) != (None, None)
        assert report.mismatch is not None and 0 < report.mismatch < 1e-5, "two ways to compute the same weights"
        assert report.importance_weight == pytest.approx(1, abs=1e-4)
        assert report.importance_cut == 0
        assert report.weights_bytes > 0 < report.weights_seconds
    code, out, _ = ask("show", "tiny")
    lines = out.splitlines()
    assert lines[1] == "rollout by transformers"
    assert lines[3].endswith("problems, greedy)"), "held-out accuracy is not that of samples"
    assert max(map(len, lines[:-1])) <= WIDTH
    heads = [line.split()[0] for line in lines]
    learnt, took = (lines[begin : begin + 4] for begin in (heads.index("iteration"), heads.index("seconds")))
    for rows in (learnt, took):
        assert len({len(line) for line in rows}) == 1, "a table's lines are equally long"
    assert learnt[0].split()[:2] == ["iteration", "sampled"], "the only reward is the accuracy, and told once"
    assert took[-1].endswith(described.iterations[-1].policy[:16])
    said = described.iterations[-1].warnings["credit/truncated_fraction"]
    assert f"warning: 3 iterations, last in 3: {said}" in " ".join(out.split())
    assert lines[-1] == f"policy {described.policy}"


def test_curves_of_several_runs_are_drawn_over_each_other(ask, copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = ask("plot", "tiny", store=copied)
    assert (code, out) == (0, "tiny.svg\n")
    assert "<svg" in (tmp_path / "tiny.svg").read_text()[:500]
    shutil.copytree(copied / "tiny", copied / "twin")
    record = json.loads((copied / "twin" / "run.json").read_text())
    record.pop("seal")
    (copied / "twin" / "run.json").write_bytes(seal(record | {"name": "twin"}))
    code, out, _ = ask("plot", "tiny", "twin", "--to", str(tmp_path / "both.png"), store=copied)
    assert (code, (tmp_path / "both.png").read_bytes()[:4]) == (0, b"\x89PNG")
    for arguments, said in (
        (["tiny", "--to", "both.png"], "both.png: expected a file that is not there yet"),
        (["tiny", "--to", "curves.jpg"], "expected a name that ends with .svg or .png"),
        ([], "the following arguments are required: RUN"),
        (["tinny"], "did you mean 'tiny'?"),
    ):
        code, out, err = ask("plot", *arguments, store=copied)
        assert (code, out) == (2, "") and said in err


def test_a_run_that_has_ended_is_watched_to_its_end_at_once_as_lines(ask):
    code, out, _ = ask("watch", "tiny")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[1] for line in lines if line.startswith("iteration ")] == ["1/3", "2/3", "3/3"]
    assert lines[-1] == "run tiny: 3 of 3 iterations"
    assert max(map(len, lines)) <= WIDTH and "\x1b" not in out


def test_rollouts_shows_the_best_first_and_the_rewards_of_the_shards(ask):
    code, out, _ = ask("rollouts", "tiny", "--json", "--sort", "reward", "--limit", "999", "--iteration", "2")
    assert code == 0
    samples = json.loads(out)
    assert len(samples) == 24
    rewards = [sample["reward"] for sample in samples]
    assert rewards == sorted(rewards, reverse=True)
    assert {sample["iteration"] for sample in samples} == {2}
    lengths = [s["tokens"] for s in json.loads(ask("rollouts", "tiny", "--json", "--sort", "length")[1])]
    assert len(lengths) == 10
    assert lengths == sorted(lengths, reverse=True)
    code, out, _ = ask("rollouts", "tiny", "--limit", "2")
    assert code == 0
    assert re.match(r"--- iteration 3, prompt [0-9a-f]{16}, sample 0, reward [\d.]+, \d+ tokens?, (stop|length), ", out)
    assert out.isprintable() or set(filter(lambda c: not c.isprintable(), out)) <= set("\n\t")


def test_names_that_are_slightly_wrong_are_answered_with_the_right_ones(ask, reference):
    assert "no run 'tniy' in file://" in (told := ask("show", "tniy")[2])
    assert told.endswith("expected tiny; did you mean 'tiny'?\n")
    assert f"try tiny --store {reference.store}" in ask("show", str(reference.run))[2]
    assert "expected a name, found a path" in ask("verify", "../tiny")[2]
    assert (
        "no rollouts of iteration 9, found iterations it-0001 to it-0003"
        in ask("rollouts", "tiny", "--iteration", "9")[2]
    )
    assert "no runs lie there; name another with --store" in ask("show", "tiny", store=reference.home / "nowhere")[2]
    assert main(["evaluate", str(reference.run)]) == 2


def test_a_run_without_a_sealed_iteration_can_be_looked_at(ask, tmp_path):
    create_run(str(tmp_path), "young", {"scoring": {"rewards": [{"kind": "numeric"}]}})
    before = files_of(tmp_path)
    assert ask("show", "young", store=tmp_path)[:2][1].endswith("no sealed iteration yet\n")
    assert ask("runs", store=tmp_path)[0] == 0
    for command, told in [("rollouts", "name the one under way with --iteration"), ("export", "nothing to export")]:
        code, _, err = ask(command, "young", store=tmp_path)
        assert code == 2
        assert f"has no sealed iteration yet: {told}" in err
    assert ask("verify", "young", store=tmp_path)[0] == 0
    assert files_of(tmp_path) == before


def test_export_gives_every_completion_with_its_run_iteration_and_rewards(ask, copied):
    code, out, _ = ask("export", "tiny", "--json", store=copied)
    assert code == 0
    table = ds.dataset(json.loads(out), format="parquet").to_table()
    assert table.num_rows == 3 * 24
    assert set(table["run"].to_pylist()) == {"tiny"}
    assert sorted(set(table["iteration"].to_pylist())) == [1, 2, 3]
    assert {"prompt", "completion", "answer", "completion_tokens", "logprobs", "reward", "reward_target", "error"} <= {
        *table.column_names
    }
    assert table["reward"].null_count == 0
    told = json.loads(ask("rollouts", "tiny", "--json", "--limit", "24", "--iteration", "1", store=copied)[1])
    first = table.filter(ds.field("iteration") == 1)
    assert first["reward"].to_pylist() == [sample["reward"] for sample in told]
    assert ask("export", "tiny", "--json", store=copied)[1] == out, "a second export finds the first"


def test_a_query_reads_what_an_export_and_the_seals_say_and_writes_nothing(ask, copied, reference):
    before = files_of(reference.store)
    sql = "select count(*) as completions, sum(reward) as reward, count(distinct iteration) as iterations from rollouts"
    code, out, _ = ask("query", sql, "--json")
    told = json.loads(ask("rollouts", "tiny", "--json", "--limit", "24", "--iteration", "1")[1])
    (every,) = json.loads(out)
    assert (code, every["completions"], every["iterations"]) == (0, 72, 3)
    sums = "select iteration, sum(reward) from rollouts group by iteration order by iteration"
    code, out, _ = ask("query", sums, "tiny")
    assert out.splitlines()[1].split() == ["1", f"{sum(sample['reward'] for sample in told):g}"]
    assert files_of(reference.store) == before
    assert ask("export", "tiny", store=copied)[0] == 0
    assert json.loads(ask("query", sql, "tiny", "--json", store=copied)[1]) == [every]
    joined = (
        "select avg(credit_reward_mean) as a, avg(reward) as b from rollouts join iterations using (run, iteration)"
    )
    (means,) = json.loads(ask("query", joined, "--json")[1])
    assert means["a"] == pytest.approx(means["b"])


def test_a_query_that_is_none_and_texts_of_a_policy_are_told_in_one_line(ask):
    code, _, err = ask("query", "select rewards from rollouts")
    assert (
        (code, err.count("\n")) == (2, 1)
        and '"reward"' in err
        and "(tables: rollouts, scores, samples, iterations, policies)" in err
    )
    code, out, _ = ask("query", "select chr(27) || chr(10) as a, repeat('x', 99) as b, null as c")
    assert (code, out.splitlines()[1].split()) == (0, [r"\x1b\n", "x" * 59 + "…", "-"])
    assert ask("query", "select 1 from rollouts where false")[:2] == (0, "no rows\n")


def test_verify_names_what_is_damaged_and_ends_with_code_1(ask, copied):
    assert ask("verify", "tiny", store=copied) == (0, "run tiny: every digest and every invariant holds\n", "")
    shard = max((copied / "tiny" / "shards").rglob("*.arrow"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, out, _ = ask("verify", "tiny", store=copied)
    assert code == 1
    assert shard.name in out
    told = json.loads(ask("verify", "tiny", "--json", store=copied)[1])
    assert (told["run"], told["ok"], len(told["problems"])) == ("tiny", False, 1)


def test_verify_names_a_seal_that_is_missing(ask, copied):
    (copied / "tiny" / "manifests" / "it-0002" / "seal.json").unlink()
    code, out, _ = ask("verify", "tiny", store=copied)
    assert code == 1
    assert "names manifest 'it-0002/seal'" in out


def test_commands_that_read_load_neither_prefect_nor_torch_and_change_nothing(reference, copied):
    before = files_of(copied)
    calls = [["runs"], ["show", "tiny"], ["rollouts", "tiny"], ["verify", "tiny"], ["rollouts", "tiny", "--json"]]
    code = f"""
import sys
from flows.cli.app import main
codes = [main([*call, "--store", {str(copied)!r}]) for call in {calls!r}]
heavy = [name for name in ("prefect", "torch", "transformers", "ray", "matplotlib") if name in sys.modules]
sys.exit(str(heavy or codes) if heavy or any(codes) else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files_of(copied) == before


def test_a_reader_that_stops_reading_is_no_error(reference):
    command = f"{RHEOSTAT} rollouts tiny --limit 999 --store {reference.store} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert re.fullmatch(r"--- iteration 3, .*\n0\n", done.stdout)
    assert done.stderr == ""


def test_a_dry_run_tells_the_plan_and_writes_nothing_at_all(tmp_path, reference, monkeypatch, capsys):
    monkeypatch.setenv("RHEOSTAT_ENGINES", str(tmp_path / "engines"))
    monkeypatch.chdir(tmp_path)
    leave_vllm()
    config = shutil.copy(reference.home / "tiny.toml", tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "PREFECT_HOME": str(home / "prefect"), "PYTHONPATH": str(ROOT)}
    before = sorted(tmp_path.rglob("*"))

    def plan(*arguments: str) -> str:
        assert main(["train", str(config), "--dry-run", *arguments]) == 0
        return capsys.readouterr().out

    command = [RHEOSTAT, "train", str(config), "--dry-run"]
    text = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # rewards of tests are not installed
    assert plan() == text
    assert f"tiny in {tmp_path / 'runs'}" in text
    assert "6 prompts x 4 = 24 completions in 3 shards" in text
    assert re.search(r"rollout +2 workers at most, of [\d.]+ MiB \(weights [\d.]+ \+ cache [\d.]+;", text)
    assert re.search(r"engine +transformers, float32", text)
    vllm = plan(
        "rollout.engine.kind=vllm",
        "rollout.engine.cache_gib=0.1",
        "policy.hidden_size=32",
        "policy.heads=1",
        "policy.kv_heads=1",
    )
    assert re.search(r"engine +vllm, float32, a server for each worker, processed log-probs\n", vllm)
    assert re.search(r"rollout +2 workers at most, of [\d.]+ MiB \(weights [\d.]+ \+ cache 102\.4;", vllm)
    facts = json.loads(plan("--json", "iterations=5", "--store", str(reference.store)))
    assert facts["lines"]["state"] == "continues after iteration 3"
    assert facts["lines"]["iterations"] == "5, 2 to do"
    assert facts["facts"]["update_optimizer_bytes"] == 8 * facts["facts"]["parameters"]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_says_which_workers_a_run_begins_with(capsys):
    config = str(ROOT / "configs" / "judge.toml")
    assert main(["plan", config, "pools.workers=8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"]["workers"] == 8
    assert main(["plan", config]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^rollout +\d+ .* assumptions$", shown, re.MULTILINE)
    assert re.search(r"^rollout worker +[\d,.]+ MiB \(weights", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) <= WIDTH
    demo = str(ROOT / "configs" / "demo.toml")
    assert main(["plan", demo, "--json"]) == 2
    assert "there is nothing to place" in capsys.readouterr().err


@pytest.mark.system
def test_a_plan_says_what_an_update_rank_holds_and_what_of_it_is_the_machines(capsys):
    demo = [str(ROOT / "configs" / "demo.toml"), "update.zero_stage=2", "update.offload=optimizer"]

    def plan(*more: str) -> str:
        assert main(["plan", *demo, *more]) == 0
        return capsys.readouterr().out

    on_cpu, on_gpu = (plan(f"pools.gpus_per_update_rank={gpus}") for gpus in (0, 1))
    assert "there is nothing to place" in on_cpu and re.search(r"^this machine +[\d,.]+ MiB$", on_cpu, re.MULTILINE)
    assert re.search(r"^update rank +[\d,.]+ MiB \(weights [\d.]+ \+ gradient [\d.]+ \+ opt", on_cpu, re.MULTILINE)
    assert "machine's own" not in on_cpu and "+ optimizer" not in on_gpu
    assert re.search(r"and [\d.]+ MiB of the\s+machine's own \(optimizer\)", on_gpu)
    rollout, update = json.loads(plan("--device", "h100", "--json"))["memory"]
    assert rollout["offloaded"] == 0 < update["offloaded"] < update["gigabytes"]


def test_a_plan_reckons_an_iteration_on_gpus_that_are_not_here(capsys):
    demo = str(ROOT / "configs" / "demo.toml")
    assert main(["plan", demo, "--device", "h100", "--tokens", "20", "pools.update_ranks=2"]) == 0
    shown = capsys.readouterr().out
    assert "H100: 989 TFLOP/s in bfloat16" in shown and "2 for rollout, 2 for the update" in shown
    assert re.search(r"^decode +\S+ +10,240 +[\d,]+$", shown, re.MULTILINE)  # 64 prompts x 8 completions x 20
    assert "if completions have 20 tokens" in shown and max(map(len, shown.splitlines())) <= WIDTH
    assert main(["plan", demo, "--device", "h100", "--tokens", "33"]) == 2
    assert "--tokens 33: expected 1 to rollout.sampling.max_new_tokens, 32" in capsys.readouterr().err


def test_a_run_whose_roles_never_competed_has_no_placement_decision(ask):
    code, out, _ = ask("placement", "tiny")
    assert (code, out.startswith("run tiny: no decision yet")) == (0, True)
    assert ask("placement", "tiny", "--json")[:2] == (0, "[]\n")
    assert "no batch was placed and is finished" in ask("placement", "tiny", "--stages")[2]


@pytest.mark.slow
def test_a_policy_is_measured_in_its_run_and_by_a_configuration_and_leaves_nothing(ask, reference, tmp_path):
    policy = json.loads(ask("show", "tiny", "--json")[1])["policy"]
    before = files_of(reference.run)
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(ROOT)}
    config = shutil.copy(reference.home / "tiny.toml", tmp_path)
    bare = shutil.copytree(policy, tmp_path / "bare")
    measured = []
    for arguments in ([policy], [str(bare), "--config", str(config)]):
        command = [RHEOSTAT, "evaluate", *arguments, "--json"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        measured.append(json.loads(done.stdout))
    assert measured[0] == measured[1]
    assert measured[0]["problems"] == 8
    assert files_of(reference.run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "prefect", "tiny.toml"]


def test_an_api_that_fails_under_parallel_controllers_is_one_error_with_a_name():
    async def flow():
        raise ExceptionGroup("controllers", [ExceptionGroup("rollout", [httpx.ConnectError("refused")])])

    with pytest.raises(ApiFailed, match="ConnectError: refused"):
        run_flow(flow())


def test_of_the_errors_that_end_parallel_controllers_ours_is_told():
    async def flow():
        raise ExceptionGroup("controllers", [ValueError("other"), ExceptionGroup("rollout", [Damaged("torn")])])

    with pytest.raises(Damaged, match="torn"):
        run_flow(flow())
