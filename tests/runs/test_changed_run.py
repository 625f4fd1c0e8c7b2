"""A run whose reward, problems or libraries are no longer those it was made with: refused, or accepted and told."""

import json
import os
from pathlib import Path

import pytest

from flows.cli.app import main
from infra.plugins import TARGETS
from tasks.verification.iterations import verify_run
from tests.support.in_process import InProcessJob
from tests.support.jobs import files_of, manifests_of

pytestmark = pytest.mark.timeout(600)

DOCUMENT = """
name = "tiny"
iterations = 1
[data]
kind = "file"
path = "{home}/problems.jsonl"
heldout_fraction = 0.5
[policy]
kind = "scratch"
hidden_size = 16
intermediate_size = 32
[rollout]
prompts = 2
group_size = 2
[rollout.sampling]
max_new_tokens = 4
[scoring]
rewards = [{{kind = "target", target = "changing_reward:length"}}]
[evaluation]
problems = 1
[pools]
cluster = "threads"
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory, prefect_api):
    """A run of one iteration by a reward and problems of its own, which change afterwards; and torch with them."""
    job = InProcessJob(tmp_path_factory.mktemp("changing"), prefect_api)
    write_reward(job, 1)
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(16)]
    (job.home / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (job.home / "tiny.toml").write_text(DOCUMENT.format(home=job.home))
    metadata = job.home / "elsewhere/torch-9.9.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(TARGETS, os.environ.get(TARGETS, ""))  # commands add the job's folder
        assert train(job) == 0
        write_reward(job, 0.5)
        with (job.home / "problems.jsonl").open("a") as problems:
            problems.write(json.dumps({"prompt": "What is 17 + 1?", "answer": "18"}) + "\n")
        patched.syspath_prepend(str(job.home / "elsewhere"))
        yield job


def write_reward(job: InProcessJob, scale: float) -> None:
    text = f"def length(prompt, completion, answer):\n    return {scale} / (1 + len(completion))\n"
    (job.home / "changing_reward.py").write_text(text)


def train(job: InProcessJob, *arguments: str) -> int:
    with job.prefect():
        return main(["train", str(job.home / "tiny.toml"), *arguments, "--store", str(job.store)])


def test_a_changed_reward_file_and_library_are_refused_by_name_until_they_are_accepted_and_then_told(job, capsys):
    before, first = files_of(job.run), manifests_of(job.run)
    for arguments in ([], ["iterations=2"], ["--dry-run"]):
        assert train(job, *arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        reward, problems, torch = err.partition("or libraries: ")[2].split("; ")[:3]
        assert reward.startswith("reward changing_reward:length: module changing_reward was ")
        assert problems.startswith(f"data file {job.home / 'problems.jsonl'} has other content (was ")
        assert torch.startswith("torch was ") and torch.endswith(", is 9.9")
        assert "; --accept-change " in err
    assert files_of(job.run) == before
    assert "from iteration" not in job.command("show").output
    assert train(job, "iterations=2", "--accept-change") == 0
    assert first.items() < manifests_of(job.run).items(), "what was made stays"
    told = f"from iteration 2 on: {reward}; {problems}; {torch}\n"
    assert told in job.command("show").output
    capsys.readouterr()
    assert train(job, "iterations=2") == 0, "what was accepted is the run's own from then on"
    (change,) = json.loads(job.command("show", "--json").output)["changes"]
    assert (change["iteration"], change["changes"]) == (2, [reward, problems, torch])
    assert verify_run(str(job.store), "tiny") == []
    Path(job.run / "journal/dependencies/0002.json").unlink()
    assert "names 'journal/dependencies/0002.json'" in verify_run(str(job.store), "tiny")[0]
