"""`rheostat forget`: no file of the store contains the prompts or their completions, and all else is unchanged."""

import asyncio
import json
import os
import shutil
import signal
from itertools import count

import pyarrow.parquet as pq
import pytest
from prefect import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from rheostat.infra.errors import RunChanged
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.manifests import decode_manifest
from rheostat.infra.store.runs import open_run
from rheostat.tasks.forgetting import remove_prompts
from rheostat.tasks.reporting import delete_published_completions
from rheostat.tasks.verification.invariants import verify_run
from tests.support.in_process import copy_job
from tests.support.jobs import files_of, manifests_of
from tests.support.processes import preload, process
from tests.support.prompts import choose_prompts, rollouts, secrets_of

preload(__name__)
pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

JUDGED = "rewards=[{kind='target',target='tests.support.rewards:even'}]"


@pytest.fixture(scope="module")
def whole(reference, tmp_path_factory):
    """Copy of the undisturbed run, exported, rescored and recredited."""
    job = copy_job(reference, tmp_path_factory.mktemp("whole") / "job")
    assert job.command("rescore", "--rewards", JUDGED, "--as", "again", "pools.cluster=threads").code == 0
    assert job.command("recredit", "--algorithm", "rloo", "--as", "rloo", "pools.cluster=threads").code == 0
    assert job.command("export").code == 0
    assert job.command("export", "--scores", "again").code == 0
    (job.run / "quarantine").mkdir()
    (job.run / "quarantine/0123456789abcdef-0123456789abcdef.arrow").write_bytes(b"torn")
    return job


def found_in(job, secrets):
    """Return the files that contain a secret. Parquet files are decoded first."""
    found = []
    for name, content in files_of(job.run).items():
        if name.endswith(".parquet"):
            rows = pq.read_table(job.run / name).to_pylist()
            content = json.dumps(rows, ensure_ascii=False, default=str).encode()
        found += [name for secret in secrets if secret in content][:1]
    return found


def write_ids(job, ids):
    path = job.home / "ids"
    path.write_text("\n".join(ids) + "\n")
    return str(path)


@pytest.mark.smoke
def test_forget_deletes_every_byte_of_the_prompts_and_nothing_else(job):
    ids, before, manifests = choose_prompts(job), rollouts(job), manifests_of(job.run)
    secrets = secrets_of(job, ids)
    assert {name.partition("/")[0] for name in found_in(job, secrets)} == {"shards", "export"}
    untouched = files_of(job.run)
    said = job.command("forget", "--prompt-ids", write_ids(job, ids))
    assert said.code == 0 and "Nothing was deleted. Add --delete" in said.output
    assert files_of(job.run) == untouched
    assert job.command("forget", "--prompt-ids", write_ids(job, ids), "--delete").code == 0
    assert found_in(job, secrets) == []
    assert not (job.run / "quarantine").exists()
    assert manifests_of(job.run).items() >= manifests.items()
    after = rollouts(job)
    assert [row for row in after if row["prompt_id"] not in ids] == [r for r in before if r["prompt_id"] not in ids]
    for old, new in zip(before, after, strict=True):
        if old["prompt_id"] in ids:
            assert new["prompt"] == new["completion"] == new["answer"] == ""
            assert len(new["completion_tokens"]) == len(old["completion_tokens"]) and not any(new["completion_tokens"])
            same = ("prompt_row", "sample", "prompt_id", "seed", "finish_reason", "segments")
            assert {name: new[name] for name in same} == {name: old[name] for name in same}


def test_commands_accept_a_run_with_forgotten_prompts(job):
    shown = job.command("show").output
    job.command("forget", "--prompt-ids", write_ids(job, choose_prompts(job)), "--delete")
    verified = job.command("verify")
    assert verified.code == 0 and "shards rewritten by rheostat forget (last by" in verified.output
    assert job.command("show").output == shown
    assert job.command("rollouts", "--limit", "100").code == 0
    assert job.command("export").code == 0
    assert job.command("rescore", "--rewards", JUDGED, "--as", "later", "pools.cluster=threads").code == 0
    assert job.command("recredit", "--algorithm", "rloo", "--as", "later", "pools.cluster=threads").code == 0
    assert job.command("verify").code == 0
    job.train()
    assert verify_run(str(job.store), "tiny") == []


def test_forget_deletes_the_prefect_artifacts_of_its_run_only(whole):
    keys = ["forgetful-rollouts", "forgetful-summary", "forgetful-iterations", "other-rollouts"]

    async def work():
        async with get_client() as client:
            for key in 2 * keys:
                await client.create_artifact(ArtifactCreate(key=key, type="markdown", data="a completion"))
            await asyncio.gather(
                *(delete_published_completions("forgetful") for _ in range(3))
            )  # several commands at once
            found = await client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=keys)))
            return [each.key for each in found]

    with whole.prefect():
        assert sorted(asyncio.run(work())) == ["forgetful-iterations"] * 2 + ["other-rollouts"] * 2


def test_forgetting_the_same_prompt_again_changes_nothing(job):
    ids = choose_prompts(job)
    job.command("forget", "--prompt-ids", write_ids(job, ids[:1]), "--delete")
    before = manifests_of(job.run)
    again = job.command("forget", "--prompt-ids", write_ids(job, ids[:1]), "--delete")
    assert again.code == 0 and "0 rows of 0 shards, 0 exports were emptied" in again.output
    assert manifests_of(job.run) == before
    secrets = secrets_of(job, ids[1:])
    assert job.command("forget", "--prompt-ids", write_ids(job, ids), "--delete").code == 0
    assert found_in(job, secrets) == [] and verify_run(str(job.store), "tiny") == []


def test_a_tombstone_names_both_shards_and_contains_no_text(job):
    ids = choose_prompts(job)
    secrets = secrets_of(job, ids)
    job.command("forget", "--prompt-ids", write_ids(job, ids), "--delete")
    stones = sorted(path for path in (job.run / "manifests/retention").glob("*.json") if b'"rows"' in path.read_bytes())
    told = [decode_manifest(path.read_bytes(), key=f"retention/{path.stem}") for path in stones]
    told = [each for each in told if each.shards]
    assert told and all(each.detail["shard"] != each.shards[0].key and each.detail["rows"] > 0 for each in told)
    assert not any(secret in path.read_bytes() for path in stones for secret in secrets)


def test_a_run_with_forgotten_prompts_cannot_be_resumed(job):
    job.command("forget", "--prompt-ids", write_ids(job, choose_prompts(job)), "--delete")
    before = files_of(job.run)
    with pytest.raises(RunChanged, match=r"removed prompts from the run, .* Choose another name"):
        job.train("iterations=4")
    assert files_of(job.run) == before


def forget_and_die(home, ids, change):
    """Kill this process at a change of the store, of any kind."""
    changes = count(1)

    def dying(method):
        def change_or_die(self, key, *arguments, **named):
            if next(changes) == change:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, key, *arguments, **named)

        return change_or_die

    LocalStore.put, LocalStore.delete = dying(LocalStore.put), dying(LocalStore.delete)
    with open_run(str(home), "tiny").lock() as run:
        remove_prompts(run, frozenset(ids), delete=True)


def test_forget_that_is_killed_at_any_write_can_be_repeated(job, tmp_path):
    ids = choose_prompts(job)
    secrets, change, code = secrets_of(job, ids), 1, -signal.SIGKILL
    while code == -signal.SIGKILL:
        copy = copy_job(job, tmp_path / f"{change}")
        with process(forget_and_die, copy.store, ids, change) as child:
            child.join()
            code = child.exitcode
        with open_run(str(copy.store), "tiny").lock() as run:
            assert len(rollouts(copy)) == len(rollouts(job))
            remove_prompts(run, frozenset(ids), delete=True)
        assert found_in(copy, secrets) == [], change
        assert verify_run(str(copy.store), "tiny") == [], change
        shutil.rmtree(copy.home)
        change += 6
    assert code == 0 and change > 40


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file. Name a file with one prompt_id per line"),
        ("", "contains no prompt_id"),
        ("0123456789abcdef\nAlice\n", "line 2: a prompt_id has 16 digits (0-9 a-f), found 'Alice'"),
        ("0123456789abcdef\n", "contains no prompt_id of a prompt in run 'tiny'"),
    ],
)
def test_invalid_files_of_prompt_ids_are_refused(reference, tmp_path, content, said):
    path = tmp_path / "ids"
    if content is not None:
        path.write_text(content)
    before = files_of(reference.run)
    ended = reference.command("forget", "--prompt-ids", str(path), "--delete")
    assert ended.code == 2 and said in ended.output and ended.output.count("\n") == 1
    assert files_of(reference.run) == before
