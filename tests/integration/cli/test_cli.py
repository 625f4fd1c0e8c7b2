"""The `rheostat` command on a finished run: the output of each command, and the messages for mistakes."""

import json
import os
import re
import shutil
import subprocess
import sys

import httpx
import pyarrow.dataset as ds
import pytest

from rheostat.flows.cli.app import main
from rheostat.flows.cli.prefect_api import run_flow
from rheostat.infra.errors import ApiFailed, Damaged
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.runs import create_run
from rheostat.infra.terminal import WIDTH
from rheostat.tasks.views.runs import RunDescription
from tests.support.environments import leave_vllm
from tests.support.jobs import RHEOSTAT, ROOT, SEARCH_PATH, files_of


def test_version_shows_the_package_version_and_the_commit(capsys):
    assert main(["--version"]) == 0
    commit = r"( \([0-9a-f]{12}(-dirty)?\))?"  # where git, or what installed it, knows
    assert re.fullmatch(rf"rheostat \d+\.\d+\.\d+{commit}\n", capsys.readouterr().out)


def test_runs_lists_the_runs_of_a_store_and_marks_damaged_runs(run_command, copied_store):
    code, out, _ = run_command("runs", "--json", store=copied_store)
    assert code == 0
    [run] = json.loads(out)
    assert (run["run"], run["iterations"], run["damage"]) == ("tiny", 3, None)
    assert 0 <= run["before"] <= 1
    assert 0 <= run["after"] <= 1
    (copied_store / "tiny" / "run.json").write_text("{}")
    code, out, _ = run_command("runs", store=copied_store)
    assert code == 0
    assert re.search(r"^tiny .*damaged: see `rheostat verify`", out, re.MULTILINE)
    assert run_command("runs", store=copied_store / "nowhere") == (
        0,
        f"no runs in {(copied_store / 'nowhere').as_uri()}\n",
        "",
    )


def test_show_reports_metrics_digests_and_seconds_of_every_iteration(run_command):
    code, out, _ = run_command("show", "tiny", "--json")
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
    code, out, _ = run_command("show", "tiny")
    lines = out.splitlines()
    assert lines[1] == "engine of rollout: transformers"
    assert lines[3].endswith("problems, greedy)"), "held-out accuracy is not that of samples"
    assert max(map(len, lines[:-1])) <= WIDTH
    heads = [line.split()[0] for line in lines]
    learnt, took = (lines[begin : begin + 4] for begin in (heads.index("iteration"), heads.index("seconds") + 1))
    for rows in (learnt, took):
        assert len({len(line) for line in rows}) == 1, "a table's lines are equally long"
    assert learnt[0].split()[:2] == ["iteration", "sampled"], "the only reward is the accuracy, and told once"
    assert took[-1].endswith(described.iterations[-1].policy[:16])
    said = described.iterations[-1].warnings["credit/truncated_fraction"]
    assert f"warning: 3 iterations, last in 3: {said}" in " ".join(out.split())
    assert lines[-1] == f"policy {described.policy}"


def test_plot_shows_the_curves_of_one_or_several_runs(run_command, copied_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_command("plot", "tiny", store=copied_store)
    assert (code, out) == (0, "tiny.svg\n")
    assert "<svg" in (tmp_path / "tiny.svg").read_text()[:500]
    shutil.copytree(copied_store / "tiny", copied_store / "twin")
    record = json.loads((copied_store / "twin" / "run.json").read_text())
    record.pop("seal")
    (copied_store / "twin" / "run.json").write_bytes(seal(record | {"name": "twin"}))
    code, out, _ = run_command("plot", "tiny", "twin", "--to", str(tmp_path / "both.png"), store=copied_store)
    assert (code, (tmp_path / "both.png").read_bytes()[:4]) == (0, b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["plot", "tiny", "--to", "file.png"], "file.png"),
        (["plot", "tiny", "--to", "curves.jpg"], ".svg or .png"),
        (["plot", "tinny"], "did you mean 'tiny'?"),
        (["show", "tniy"], "Existing runs: tiny; did you mean 'tiny'?"),
        (["show", "{run}"], "Try tiny --store {store}"),
        (["verify", "../tiny"], "instead of a path"),
        (["rollouts", "tiny", "--iteration", "9"], "rollouts: it-0001 to it-0003"),
        (["placement", "tiny", "--stages"], "no finished batch"),
        (["query", "select rewards from rollouts"], "(tables: rollouts, scores, samples, iterations, policies)"),
        (["query", "select rewards from rollouts"], '"reward"'),
    ],
)
def test_an_unknown_name_is_refused_with_the_valid_names(
    run_command, reference, tmp_path, monkeypatch, arguments, names
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.png").touch()
    places = {"run": reference.run, "store": reference.store}
    code, out, err = run_command(*(word.format(**places) for word in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert names.format(**places) in err


def test_watch_prints_the_lines_of_a_finished_run_and_ends(run_command):
    code, out, _ = run_command("watch", "tiny")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[1] for line in lines if line.startswith("iteration ")] == ["1/3", "2/3", "3/3"]
    assert lines[-1] == "run tiny: 3 of 3 iterations"
    assert max(map(len, lines)) <= WIDTH and "\x1b" not in out


def test_rollouts_sorts_completions_by_reward_and_length(run_command):
    code, out, _ = run_command("rollouts", "tiny", "--json", "--sort", "reward", "--limit", "999", "--iteration", "2")
    assert code == 0
    samples = json.loads(out)
    assert len(samples) == 24
    rewards = [sample["reward"] for sample in samples]
    assert rewards == sorted(rewards, reverse=True)
    assert {sample["iteration"] for sample in samples} == {2}
    lengths = [s["tokens"] for s in json.loads(run_command("rollouts", "tiny", "--json", "--sort", "length")[1])]
    assert len(lengths) == 10
    assert lengths == sorted(lengths, reverse=True)
    code, out, _ = run_command("rollouts", "tiny", "--limit", "2")
    assert code == 0
    assert re.match(r"--- iteration 3, prompt [0-9a-f]{16}, sample 0, reward [\d.]+, \d+ tokens?, (stop|length), ", out)
    assert out.isprintable() or set(filter(lambda c: not c.isprintable(), out)) <= set("\n\t")


def test_read_only_commands_accept_a_run_without_a_sealed_iteration(run_command, tmp_path):
    create_run(str(tmp_path), "young", {"scoring": {"rewards": [{"kind": "numeric"}]}})
    before = files_of(tmp_path)
    assert run_command("show", "young", store=tmp_path)[:2][1].endswith("no completed iteration yet\n")
    assert run_command("runs", store=tmp_path)[0] == 0
    for command, told in [("rollouts", "--iteration"), ("export", "to export")]:
        code, _, err = run_command(command, "young", store=tmp_path)
        assert code == 2
        assert "has no completed iteration" in err and told in err
    assert run_command("verify", "young", store=tmp_path)[0] == 0
    assert files_of(tmp_path) == before


def test_export_writes_every_completion_with_its_run_iteration_and_rewards(run_command, copied_store):
    code, out, _ = run_command("export", "tiny", "--json", store=copied_store)
    assert code == 0
    table = ds.dataset(json.loads(out), format="parquet").to_table()
    assert table.num_rows == 3 * 24
    assert set(table["run"].to_pylist()) == {"tiny"}
    assert sorted(set(table["iteration"].to_pylist())) == [1, 2, 3]
    assert {"prompt", "completion", "answer", "completion_tokens", "logprobs", "reward", "reward_target", "error"} <= {
        *table.column_names
    }
    assert table["reward"].null_count == 0
    told = json.loads(
        run_command("rollouts", "tiny", "--json", "--limit", "24", "--iteration", "1", store=copied_store)[1]
    )
    first = table.filter(ds.field("iteration") == 1)
    assert first["reward"].to_pylist() == [sample["reward"] for sample in told]
    assert run_command("export", "tiny", "--json", store=copied_store)[1] == out, "a second export finds the first"


def test_a_query_agrees_with_exports_and_seals_and_writes_nothing(run_command, copied_store, reference):
    before = files_of(reference.store)
    sql = "select count(*) as completions, sum(reward) as reward, count(distinct iteration) as iterations from rollouts"
    code, out, _ = run_command("query", sql, "--json")
    told = json.loads(run_command("rollouts", "tiny", "--json", "--limit", "24", "--iteration", "1")[1])
    (every,) = json.loads(out)
    assert (code, every["completions"], every["iterations"]) == (0, 72, 3)
    sums = "select iteration, sum(reward) from rollouts group by iteration order by iteration"
    code, out, _ = run_command("query", sums, "tiny")
    assert out.splitlines()[1].split() == ["1", f"{sum(sample['reward'] for sample in told):g}"]
    assert files_of(reference.store) == before
    assert run_command("export", "tiny", store=copied_store)[0] == 0
    assert json.loads(run_command("query", sql, "tiny", "--json", store=copied_store)[1]) == [every]
    joined = (
        "select avg(credit_reward_mean) as a, avg(reward) as b from rollouts join iterations using (run, iteration)"
    )
    (means,) = json.loads(run_command("query", joined, "--json")[1])
    assert means["a"] == pytest.approx(means["b"])


def test_a_query_escapes_control_characters_and_truncates_long_texts(run_command):
    code, out, _ = run_command("query", "select chr(27) || chr(10) as a, repeat('x', 99) as b, null as c")
    assert (code, out.splitlines()[1].split()) == (0, [r"\u001b\n", "x" * 59 + "…", "-"])
    assert run_command("query", "select 1 from rollouts where false")[:2] == (0, "no rows\n")


def test_verify_names_damaged_files_and_ends_with_code_1(run_command, copied_store):
    assert run_command("verify", "tiny", store=copied_store) == (
        0,
        "run tiny: every digest and every invariant holds\n",
        "",
    )
    shard = max((copied_store / "tiny" / "shards").rglob("*.arrow"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    code, out, _ = run_command("verify", "tiny", store=copied_store)
    assert code == 1
    assert shard.name in out
    told = json.loads(run_command("verify", "tiny", "--json", store=copied_store)[1])
    assert (told["run"], told["ok"], len(told["problems"])) == ("tiny", False, 1)
    (copied_store / "tiny" / "manifests" / "it-0002" / "seal.json").unlink()
    assert "names manifest 'it-0002/seal'" in run_command("verify", "tiny", store=copied_store)[1]


def test_read_only_commands_import_no_heavy_library_and_change_nothing(reference, copied_store):
    before = files_of(copied_store)
    calls = [["runs"], ["show", "tiny"], ["rollouts", "tiny"], ["verify", "tiny"], ["rollouts", "tiny", "--json"]]
    code = f"""
import sys
from rheostat.flows.cli.app import main
codes = [main([*call, "--store", {str(copied_store)!r}]) for call in {calls!r}]
heavy = [name for name in ("prefect", "torch", "transformers", "ray", "matplotlib") if name in sys.modules]
sys.exit(str(heavy or codes) if heavy or any(codes) else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files_of(copied_store) == before


@pytest.mark.parametrize("arguments", [["runs"], ["runs", "--json"], ["runs", "--limit", "1"]])
def test_the_list_of_runs_loads_no_arrays_and_no_images(reference, arguments):
    code = f"""
import sys
from rheostat.flows.cli.app import main
code = main([*{arguments!r}, "--store", {str(reference.store)!r}])
heavy = {{"numpy", "pyarrow", "PIL", "torch", "scipy"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else code)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "tiny" in done.stdout


def test_a_closed_pipe_is_no_error(reference):
    command = f"{RHEOSTAT} rollouts tiny --limit 999 --store {reference.store} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert re.fullmatch(r"--- iteration 3, .*\n0\n", done.stdout)
    assert done.stderr == ""


@pytest.mark.smoke
@pytest.mark.system
def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, reference, monkeypatch, capsys):
    monkeypatch.setenv("RHEOSTAT_ENGINES", str(tmp_path / "engines"))
    monkeypatch.chdir(tmp_path)
    leave_vllm()
    config = shutil.copy(reference.home / "tiny.toml", tmp_path)
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "HOME": str(home), "PREFECT_HOME": str(home / "prefect"), "PYTHONPATH": SEARCH_PATH}
    before = sorted(tmp_path.rglob("*"))

    def plan(*arguments: str) -> str:
        assert main(["train", str(config), "--dry-run", *arguments]) == 0
        return capsys.readouterr().out

    command = [RHEOSTAT, "train", str(config), "--dry-run"]
    text = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert sorted(tmp_path.rglob("*")) == before
    monkeypatch.setenv("PYTHONPATH", SEARCH_PATH)  # rewards of tests are not installed
    assert plan() == text
    assert f"tiny in {tmp_path / 'runs'}" in text
    assert "6 prompts x 4 = 24 completions in 3 shards" in text
    assert re.search(r"rollout +at most 2 workers with [\d.]+ MiB \(weights [\d.]+ \+ cache [\d.]+;", text)
    assert re.search(r"engine +transformers, float32", text)
    vllm = plan(
        "rollout.engine.kind=vllm",
        "rollout.engine.cache_gib=0.1",
        "policy.hidden_size=32",
        "policy.heads=1",
        "policy.kv_heads=1",
    )
    assert re.search(r"engine +vllm, float32, a server for each worker, processed log-probs\n", vllm)
    assert re.search(r"rollout +at most 2 workers with [\d.]+ MiB \(weights [\d.]+ \+ cache 102\.4;", vllm)
    facts = json.loads(plan("--json", "iterations=5", "--store", str(reference.store)))
    assert facts["lines"]["state"] == "continues after iteration 3"
    assert facts["lines"]["iterations"] == "5, 2 remaining"
    assert facts["facts"]["update_optimizer_bytes"] == 8 * facts["facts"]["parameters"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def show_plan(capsys):
    """Function that runs `rheostat plan` on a bundled configuration and returns exit code, stdout and stderr."""

    def plan(config: str, *arguments: str) -> tuple[int, str, str]:
        code = main(["plan", str(ROOT / "configs" / config), *arguments])
        return (code, *capsys.readouterr())

    return plan


@pytest.mark.system
def test_a_plan_names_the_workers_that_a_run_begins_with(show_plan):
    code, out, _ = show_plan("judge.toml", "pools.workers=8", "--json")
    assert (code, json.loads(out)["inputs"]["workers"]) == (0, 8)
    code, out, _ = show_plan("judge.toml")
    assert code == 0
    assert re.search(r"^rollout +\d+ .* assumptions$", out, re.MULTILINE)
    assert re.search(r"^rollout worker +[\d,.]+ MiB \(weights", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= WIDTH


@pytest.mark.system
def test_a_plan_estimates_an_iteration_on_gpus_of_another_machine(show_plan):
    code, out, _ = show_plan("demo.toml", "--device", "h100", "--tokens", "20", "pools.update_ranks=2")
    assert code == 0
    assert "H100: 989 TFLOP/s in bfloat16" in out and "2 for rollout, 2 for the update" in out
    assert re.search(r"^decode +\S+ +10,240 +[\d,]+$", out, re.MULTILINE)  # 64 prompts x 8 completions x 20
    assert "for completions of 20 tokens" in out and max(map(len, out.splitlines())) <= WIDTH


def test_a_plan_for_more_tokens_than_max_new_tokens_is_refused(show_plan):
    code, _, err = show_plan("demo.toml", "--device", "h100", "--tokens", "33")
    assert code == 2 and all(name in err for name in ("--tokens 33", "max_new_tokens, which is 32"))


@pytest.mark.smoke
@pytest.mark.system
def test_a_plan_as_json_has_the_memory_even_without_a_placement_decision(show_plan):
    code, out, _ = show_plan("demo.toml", "--json")
    plan = json.loads(out)
    assert (code, plan["decision"], set(plan["memory"])) == (0, None, {"rollout worker", "update rank", "this machine"})


@pytest.mark.system
def test_a_plan_shows_the_memory_of_an_update_rank_and_the_offloaded_part_of_it(show_plan):
    def plan(*more: str) -> str:
        code, out, err = show_plan("demo.toml", "update.zero_stage=2", "update.offload=optimizer", *more)
        assert code == 0, err
        return out

    on_cpu, on_gpu = (plan(f"pools.gpus_per_update_rank={gpus}") for gpus in (0, 1))
    assert "no reward model needs worker slots" in on_cpu and re.search(
        r"^this machine +[\d,.]+ MiB$", on_cpu, re.MULTILINE
    )
    assert re.search(r"^update rank +[\d,.]+ MiB \(weights [\d.]+ \+ gradient [\d.]+ \+ opt", on_cpu, re.MULTILINE)
    assert "machine memory" not in on_cpu and "+ optimizer" not in on_gpu
    assert re.search(r"and [\d.]+ MiB of\s+machine\s+memory\s+\(optimizer\s+\+\s+writing\)", on_gpu)
    rollout, update = json.loads(plan("--device", "h100", "--json"))["memory"]
    assert rollout["offloaded"] == 0 < update["offloaded"] < update["gigabytes"]


def test_a_run_whose_roles_never_competed_has_no_placement_decision(run_command):
    code, out, _ = run_command("placement", "tiny")
    assert (code, out.startswith("run tiny: no placement decision yet")) == (0, True)
    assert run_command("placement", "tiny", "--json")[:2] == (0, "[]\n")


def test_evaluate_refuses_the_directory_of_a_run(reference):
    assert main(["evaluate", str(reference.run)]) == 2


@pytest.mark.slow
def test_evaluate_measures_a_policy_of_a_run_or_of_a_directory_and_writes_nothing(run_command, reference, tmp_path):
    policy = json.loads(run_command("show", "tiny", "--json")[1])["policy"]
    before = files_of(reference.run)
    environment = {**os.environ, "PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": SEARCH_PATH}
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


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (httpx.ConnectError("refused"), ApiFailed, "ConnectError: refused"),
        (ExceptionGroup("rollout", [Damaged("torn")]), Damaged, "torn"),
    ],
)
def test_the_most_specific_error_of_parallel_controllers_is_raised(error, expected, message):
    async def flow():
        others = [] if expected is ApiFailed else [ValueError("other")]
        raise ExceptionGroup("controllers", [*others, ExceptionGroup("role", [error])])

    with pytest.raises(expected, match=message):
        run_flow(flow())
