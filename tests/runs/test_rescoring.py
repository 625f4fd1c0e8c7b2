"""Stored rollouts that are rescored and recredited: equal settings give equal results, and invalid ones are refused."""

import json
import shutil
from collections.abc import Iterator

import pyarrow.parquet as pq
import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.manifests import decode_manifest
from rheostat.infra.store.runs import open_run
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import InProcessJob, copy_job
from tests.support.jobs import ROOT, Fault, Job, files_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

JUDGED = (
    'rewards=[{kind="target", target="tests.support.rewards:even", weight=0.5},'
    '{kind="judge", model={kind="trained", warmup={steps=10},'
    ' shape={kind="scratch", hidden_size=16, intermediate_size=32, context=192}}}]'
)
LENGTHS = 'rewards=[{kind="target",target="tests.support.rewards:length",weight=0.1}]'


@pytest.fixture(scope="module")
def again(reference, tmp_path_factory):
    """Finished run, rescored with its own rewards and with a judge, and recredited from both."""
    job, threads = copy_job(reference, tmp_path_factory.mktemp("again") / "job"), "pools.cluster=threads"
    give(job, "rescore", "--rewards", str(job.home / "tiny.toml"), "--as", "own", "--iterations", "2-3", threads)
    give(job, "rescore", "--rewards", JUDGED, "--as", "judged", "--iterations", "1", threads)
    give(job, "recredit", "--algorithm", "grpo", "--as", "own", threads)
    chosen = ("--scores", "judged", "--iterations", "1")
    give(job, "recredit", "--algorithm", "rloo", "--as", "judged-rloo", *chosen, threads)
    return job


def give(job: Job | InProcessJob, *arguments: str) -> str:
    name, *others = arguments
    ended = job.command(name, *others)
    assert ended.code == 0, ended.output
    return ended.output


def manifests(job: Job, prefix: str) -> dict[str, dict[str, object]]:
    """Return the manifests under a prefix by the rest of their key, read from their files."""
    root = job.run / "manifests" / prefix
    return {
        path.relative_to(root).with_suffix("").as_posix(): json.loads(path.read_text())
        for path in sorted(root.rglob("*.json"))
    }


def shards(manifest: dict[str, object]) -> object:
    return manifest["shards"]


@pytest.mark.smoke
def test_rescoring_with_the_same_rewards_gives_the_same_score_shards(again):
    new, stored = manifests(again, "rescore/own"), manifests(again, "")
    scored = [key for key in new if "/scoring/" in key]
    assert scored == [f"it-{number:04d}/scoring/{shard:04d}" for number in (2, 3) for shard in range(3)]
    for key in scored:
        assert shards(new[key]) == shards(stored[key])
        assert new[key]["parents"] == [stored[key.replace("scoring", "rollout")]["digest"]]
    seals = [new[f"it-{number:04d}/seal"]["metrics"] for number in (2, 3)]
    assert [(metrics["changed_fraction"], metrics["missing"]) for metrics in seals] == [(0, 0), (0, 0)]


def test_recrediting_with_the_same_algorithm_gives_the_same_samples(again):
    new, stored = manifests(again, "recredit/own"), manifests(again, "")
    for number in (1, 2, 3):
        key = f"it-{number:04d}/credit"
        assert shards(new[key]) == shards(stored[key])
        assert new[key]["metrics"] == stored[key]["metrics"]
        assert new[key]["parents"] == stored[key]["parents"]
        metrics = new[f"it-{number:04d}/seal"]["metrics"]
        assert metrics["correlation"] == pytest.approx(1)
        assert metrics["coinciding"] == metrics["samples"]


def test_rescoring_trains_a_new_judge_for_stored_rollouts(again):
    new, stored = manifests(again, "rescore/judged"), manifests(again, "")
    assert {"terms", "judge-judge/base", "judge-judge/model", "it-0001/seal"} <= {*new}
    for shard in range(3):
        rollouts, verdicts = stored[f"it-0001/rollout/{shard:04d}"], new[f"it-0001/judge-judge/{shard:04d}"]
        scores = new[f"it-0001/scoring/{shard:04d}"]
        assert verdicts["parents"] == [rollouts["digest"], new["judge-judge/model"]["digest"]]
        assert scores["parents"] == [rollouts["digest"], verdicts["digest"]]
        assert scores["metrics"]["count"] == 8
    credit = manifests(again, "recredit/judged-rloo")["it-0001/credit"]
    assert new["it-0001/scoring/0000"]["digest"] in credit["parents"]


def test_commands_accept_a_run_with_rescored_rollouts(again):
    assert "rescored as judged: iteration 1; rescored as own: iterations 2-3; recredited as " in give(again, "show")
    assert verify_run(str(again.store), "tiny") == []
    [path] = give(again, "export", "--scores", "judged").splitlines()
    exported = pq.read_table(path)
    assert exported["reward_judge"].null_count < exported.num_rows == 24
    run = open_run(str(again.store), "tiny")
    named = {shard.key for manifest in run.manifests() for shard in manifest.shards}
    assert {entry.key for entry in run.store.entries("shards/")} == named


def test_verify_finds_scores_of_other_rollouts_and_a_wrong_comparison(again, tmp_path):
    job = copy_job(again, tmp_path / "job")
    shutil.rmtree(job.run / "chain/rescore")  # like a rescoring by an earlier version, whose edits no hash shows
    first, second = (job.run / f"manifests/rescore/own/it-0002/scoring/000{n}.json" for n in (0, 1))
    manifest = decode_manifest(first.read_bytes(), key="rescore/own/it-0002/scoring/0000")
    other = decode_manifest(second.read_bytes(), key="rescore/own/it-0002/scoring/0001")
    first.write_bytes(manifest.model_copy(update={"shards": other.shards}).encode())
    problems = "\n".join(verify_run(str(job.store), "tiny"))
    assert "rescore/own/it-0002/scoring/0000: the scores are of other rollouts than it-0002/rollout/0000" in problems
    assert "rescore/own/it-0002/seal: no manifest has the parent digest" in problems
    first.write_bytes(manifest.encode())
    path = job.run / "manifests/rescore/own/it-0003/seal.json"
    sealed = decode_manifest(path.read_bytes(), key="rescore/own/it-0003/seal")
    path.write_bytes(sealed.model_copy(update={"metrics": {**sealed.metrics, "reward_mean": 7.0}}).encode())
    assert verify_run(str(job.store), "tiny") == [
        "rescore/own/it-0003/seal: the stored metrics differ from those that follow from the shards"
    ]


def test_repeating_a_rescoring_reports_the_result_and_writes_nothing(again, capsys):
    before = files_of(again.run)
    arguments = ["--as", "own", "--iterations", "3", "--json", "--store", str(again.store)]
    assert main(["rescore", "tiny", "--rewards", str(again.home / "tiny.toml"), *arguments]) == 0
    [line] = json.loads(capsys.readouterr().out)["iterations"]
    assert (line["iteration"], line["completions"], line["changed"]) == (3, 24, 0)
    assert main(["recredit", "tiny", "--algorithm", "grpo", *arguments]) == 0
    [line] = json.loads(capsys.readouterr().out)["iterations"]
    assert line["samples"] == line["coinciding"] > 0
    assert files_of(again.run) == before


def test_rewards_with_other_code_are_refused_under_the_same_name(again, tmp_path, monkeypatch, capsys):
    before, edited = files_of(again.run), tmp_path / "tests/support/rewards.py"
    edited.parent.mkdir(parents=True)
    edited.write_text((ROOT / "tests/support/rewards.py").read_text() + "# edited\n")
    for package in (edited.parent, edited.parent.parent):
        (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)  # where processes of rewards look first
    arguments = ["--rewards", str(again.home / "tiny.toml"), "--iterations", "3", "--store", str(again.store)]
    assert main(["rescore", "tiny", *arguments, "--as", "own"]) == 2
    told = capsys.readouterr().err
    assert "rescore/own of run 'tiny' in " in told
    assert "reward tests.support.rewards:even: module tests.support.rewards was " in told
    assert told.endswith(". Another name starts from the beginning.\n")
    assert files_of(again.run) == before


def refusals() -> Iterator[tuple[list[str], str]]:
    regex = ["rescore", "--rewards", 'rewards=[{kind="regex",pattern="x"}]']
    yield ["rescore", "--rewards", 'rewards=[{kind="regx",pattern="x"}]'], "got 'regx'; did you mean 'regex'?"
    yield ["rescore", "--rewards", 'rewards=[{kind="regex",patern="x"}]'], "patern'; did you mean 'pattern'?"
    yield ["rescore", "--rewards", 'rewards=[{kind="regex"'], "is not valid TOML"
    yield ["rescore", "--rewards", "nowhere.toml"], "is neither an existing TOML file nor inline TOML"
    yield ["rescore", "--rewards", "configs/gsm8k.tml"], "neither an existing TOML file"
    yield ["rescore", "--rewards", 'rewards=[{kind="target",target="tests.support.rewards:evn"}]'], "'even'"
    yield ["rescore", "--rewards", "seed=3"], "must contain a table [scoring], but it contains only: seed"
    yield [*regex, "--as", "No"], "--as 'No' is not a valid name. Use at most 64 characters (a-z"
    yield [*regex, "--as", "own"], "rescoring 'own' of run 'tiny' already exists with other settings"
    yield [*regex, "--iterations", "2-9"], "the completed iterations of run 'tiny' are 1 to 3"
    yield [*regex, "--iterations", "3-2"], "must be numbers and ranges such as 3, 3-7 or 1,3-5, found '3-2'"
    yield [*regex, "--iterations", "0"], "the completed iterations of run 'tiny' are 1 to 3"
    yield [*regex, "--iterations", "one"], "found 'one'"
    yield [*regex, "seed=3"], "'seed=3' is not allowed, because the other settings of a stored run cannot be changed"
    yield [*regex, "pools.wrkers=3"], "did you mean 'workers'?"
    yield (
        ["rescore", "--rewards", JUDGED.replace('"judge",', '"judge",slots=2,'), "pools.workers=1"],
        "at least 2 worker slots",
    )
    yield ["recredit", "--algorithm", "rlo"], "got 'rlo'; did you mean 'rloo'?"
    yield ["recredit", "--algorithm", 'kind="grpo"\ngama=1'], "unknown key 'algorithm.gama'"
    yield (
        ["recredit", "--algorithm", "ppo"],
        "ppo needs values of a critic for every token, but the run was trained with grpo",
    )
    yield ["recredit", "--algorithm", 'kind="rloo"\nkl={coefficient=0.1}'], "rloo needs log-probs of the initial policy"
    yield ["recredit", "--algorithm", "rloo", "--scores", "judgd"], "judged, own; did you mean 'judged'?"
    yield ["recredit", "--algorithm", "rloo", "--scores", "judged"], "rescoring 'judged' has no scores of iteration 2"
    yield (
        ["recredit", "--algorithm", "rloo", "--as", "own"],
        'already exists with other settings: algorithm.kind was "grpo", is',
    )


@pytest.mark.parametrize(("arguments", "expected"), refusals(), ids=lambda value: str(value)[-40:])
def test_invalid_rescorings_are_refused_in_one_line_and_write_nothing(arguments, expected, again, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    before = files_of(again.run)
    command, *others = arguments
    assert main([command, "tiny", *others, "--store", str(again.store)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rheostat: ")
    assert err.count("\n") == 1
    assert expected in err, err
    assert files_of(again.run) == before


def test_rescoring_a_locked_run_is_refused(copied, capsys):
    before = files_of(copied.run)
    with open_run(str(copied.store), "tiny").lock():
        held = files_of(copied.run)
        for asked in (["rescore", "--rewards", LENGTHS], ["recredit", "--algorithm", "rloo"]):
            command, *others = asked
            assert main([command, "tiny", *others, "--store", str(copied.store)]) == 2
            assert "is locked by process" in capsys.readouterr().err
        assert files_of(copied.run) == held
    assert [name for name in held if name not in before] == ["lease/000002.json"]


def test_a_damaged_record_of_a_rescoring_is_named(copied):
    path = copied.run / "manifests/rescore/x/terms.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(seal({"key": "rescore/x/terms"}))
    ended = copied.command("rescore", "--rewards", LENGTHS, "--as", "x")
    assert ended.code == 1
    assert "rescore/x/terms" in ended.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "at",
    [
        "rescore/x/judge-judge/base",
        "rescore/x/it-0001/judge-judge/000",
        "rescore/x/it-0002/scoring/0001",
        "rescore/x/it-0001/seal",
    ],
)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_rescoring_resumes_with_the_missing_work_only(copied, reference, tmp_path_factory, at, moment):
    copied = Job(copied.home, copied.api)
    undisturbed = Job(copy_job(reference, tmp_path_factory.mktemp("undisturbed") / "job").home, copied.api)
    asked = ("--rewards", JUDGED, "--as", "x", "--iterations", "1-2")
    give(undisturbed, "rescore", *asked)
    killed = copied.command("rescore", *asked, faults=(Fault("driver", moment, f"manifests/{at}"),))
    assert (killed.code, copied.struck()) == (-9, 1), killed.output
    done = manifests(copied, "rescore/x")
    give(copied, "rescore", *asked)
    whole, expected = manifests(copied, "rescore/x"), manifests(undisturbed, "rescore/x")
    assert {key: m["digest"] for key, m in whole.items()} == {key: m["digest"] for key, m in expected.items()}
    assert {key: m for key, m in whole.items() if key in done} == done, "what was there was not made again"
    assert verify_run(str(copied.store), "tiny") == []


@pytest.mark.parametrize(
    ("command", "options"), [("rescore", ("--rewards", LENGTHS)), ("recredit", ("--algorithm", "rloo"))]
)
def test_a_deleted_newest_record_of_a_rescoring_is_reported_and_nothing_else_is_deleted(copied, command, options):
    give(copied, command, *options, "--as", "x", "--iterations", "1-2", "pools.cluster=threads")
    newest = f"{command}/x/it-0002/seal"
    assert verify_run(str(copied.store), "tiny") == []
    (copied.run / f"manifests/{newest}.json").unlink()
    assert any(newest in problem for problem in verify_run(str(copied.store), "tiny"))
    assert copied.command("gc", "--delete").code == 1
