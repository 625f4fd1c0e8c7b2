"""`rheostat gc` during a run and afterwards."""

import json
import shutil
from threading import Event, Thread

import pytest

from rheostat.infra.errors import RunLocked
from rheostat.infra.store.garbage import collect_garbage, find_garbage
from rheostat.infra.store.runs import open_run
from tests.support import checker
from tests.support.in_process import InProcessJob, run_command
from tests.support.jobs import files_of, manifests_of, shards_of, wait_for
from tests.support.prompts import choose_prompts

pytestmark = pytest.mark.timeout(1200)


def collect(job, *arguments):
    """Return what the command reports about the run."""
    (said,) = json.loads(job.command("gc", *arguments, "--json").output)
    return said


@pytest.mark.system
def test_garbage_collection_during_a_run_deletes_nothing(reference, tmp_path, prefect_api):
    job, ended, said = InProcessJob(tmp_path, prefect_api), Event(), []

    def collector():
        assert wait_for((job.run / "lease/000001.json").exists)
        while not ended.wait(0.01):
            try:
                with open_run(str(job.store), "tiny").lock() as run:
                    said.append(collect_garbage(run))
            except RunLocked:
                said.append("held")

    thread = Thread(target=collector)
    thread.start()
    try:
        job.train()
    finally:
        ended.set()
        thread.join()
    assert said.count("held") > 10 and all(each in ("held", {}) for each in said)
    assert manifests_of(job.run) == manifests_of(reference.run)


def test_a_finished_run_has_no_garbage(reference):
    assert find_garbage(open_run(str(reference.store), "tiny")) == {}


def test_gc_deletes_only_files_that_no_manifest_names(copied, reference):
    (copied.run / "shards/4b").mkdir(exist_ok=True)
    (copied.run / "shards/4b/nobodys.arrow").write_bytes(bytes(1000))
    assert collect(copied)["kinds"] == {"shards": {"objects": 1, "bytes": 1000}}
    assert "Nothing was deleted. Add --delete" in copied.command("gc").output
    assert collect(copied, "--delete")["deleted"] is True
    made = files_of(copied.run)
    assert {name for name in made.items() ^ files_of(reference.run).items() if "lease" not in name[0]} == set()
    assert checker.problems_of(copied.run) == []


@pytest.mark.parametrize(
    "lost", ["manifests/it-0001", "manifests", "manifests/it-0002/update.json", "chain+manifests/it-0001"]
)
def test_gc_forget_and_copy_refuse_a_run_with_lost_records(copied, lost):
    (prompt_id,) = choose_prompts(copied)[:1]
    (copied.home / "ids").write_text(prompt_id)
    for name in lost.split("+"):
        path = copied.run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = files_of(copied.store)
    for command in (
        ("gc", "--delete"),
        ("gc", "--keep", "0", "--delete"),
        ("forget", "--prompt-ids", str(copied.home / "ids"), "--delete"),
    ):
        ended = copied.command(*command)
        assert ended.code == 1 and "run 'tiny'" in ended.output and "Restore the record" in ended.output
    ended = run_command("copy", "tiny", str(copied.store), str(copied.home / "copy"))
    assert ended.code == 1 and "Restore the record from a copy of the run" in ended.output
    assert files_of(copied.store) == before and not (copied.home / "copy/tiny/run.json").exists()


def test_verify_and_show_report_the_shards_that_gc_deleted(copied, tmp_path):
    exported = copied.command("export").output
    assert "selected by rheostat gc --keep 0" in copied.command("gc", "--keep", "0").output
    assert shards_of(copied.run), "without --delete nothing is deleted"
    before = manifests_of(copied.run)
    assert copied.command("gc", "--keep", "0", "--delete").code == 0
    assert not shards_of(copied.run) and not (copied.run / "policies").exists()
    assert manifests_of(copied.run).items() >= before.items()
    verified = copied.command("verify")
    assert verified.code == 0 and "deleted rollouts, samples and policies by rheostat gc --keep 0" in verified.output
    shown = copied.command("show")
    assert shown.code == 0 and "deleted by rheostat gc" in shown.output and "policy /" not in shown.output
    assert copied.command("runs").code != 1
    refused = [
        copied.command("rollouts"),
        copied.command("export"),
        copied.command("rescore", "--rewards", "rewards=[{kind='regex',pattern='a'}]", "pools.cluster=threads"),
    ]
    assert [ended.code for ended in refused] == [2, 2, 2]
    assert all("were deleted by rheostat gc --keep 0" in ended.output for ended in refused)
    assert exported and (copied.run / "export/it-0001.parquet").exists()


def test_a_run_whose_shards_gc_deleted_cannot_be_resumed(copied):
    from rheostat.infra.errors import RunChanged

    copied.command("gc", "--keep", "0", "--delete")
    before = files_of(copied.run)
    with pytest.raises(RunChanged, match="Another name starts from the beginning"):
        copied.train("iterations=4")
    assert files_of(copied.run) == before


@pytest.mark.thorough
def test_gc_keeps_a_run_with_the_given_tag(copied):
    copied.train('tags=["paper"]')
    assert "tags paper" in copied.command("show").output
    assert collect(copied, "--keep", "0", "--tag", "paper")["given_up"] is False
    assert collect(copied, "--keep", "0")["given_up"] is True


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--older-than", "30"), "--older-than '30' must be a number followed by m (minutes)"),
        (("--keep", "-1"), "--keep is -1, but it must be at least 0"),
        (("--tag", "paper"), "--tag protects runs from deletion by --older-than or --keep"),
        (("--keep", "1", "--tag", "papr"), "--tag 'papr': no run of the store has this tag. Existing tags: none"),
        (("other", "--keep", "1"), "no run 'other'"),
    ],
)
def test_invalid_rules_of_gc_are_refused(reference, arguments, said):
    ended = reference.command("gc", *arguments)
    assert ended.code == 2 and said in ended.output and ended.output.count("\n") == 1


def iterations_with_shards(run):
    """Return the iterations that have a rollout shard in the run."""
    return {each.key[:7] for each in run.manifests("it-") if each.shards and run.store.exists(each.shards[0].key)}


@pytest.mark.system
def test_retention_of_rollouts_changes_no_other_manifest_and_the_run_continues(reference, copied):
    assert copied.command("export").code == 0
    (copied.run / "export/it-0001.parquet").unlink()
    copied.train("retention.rollouts_keep_last=1")
    run = open_run(str(copied.store), "tiny")
    assert iterations_with_shards(run) == {"it-0003"} and find_garbage(run) == {}
    new = manifests_of(copied.run).items() ^ manifests_of(reference.run).items()
    assert {key for key, _ in new} == {"retention/it-0001", "retention/it-0002"}
    verified = copied.command("verify")
    assert verified.code == 0, verified.output
    assert "deleted rollouts of 2 iterations by retention.rollouts_keep_last" in verified.output
    assert "rollouts of iteration 1 were deleted" in copied.command("rollouts", "--iteration", "1").output
    assert copied.command("export").output.count(".parquet") == 1
    copied.train("retention.rollouts_keep_last=2", "iterations=5")
    assert iterations_with_shards(open_run(str(copied.store), "tiny")) == {"it-0004", "it-0005"}
    assert manifests_of(copied.run).items() >= manifests_of(reference.run).items()
    assert copied.command("verify").code == 0
