"""A run ends with a report in its store and a link to it in Prefect's artifacts."""

import asyncio
import re
import shutil

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from rheostat.infra.errors import StoreFailed
from rheostat.tasks import reporting
from tests.support.data_files import number_problems, write_lines
from tests.support.in_process import InProcessJob

pytestmark = pytest.mark.system


async def links(key):
    async with get_client() as client:
        wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
        return [artifact.data for artifact in await client.read_artifacts(artifact_filter=wanted)]


def test_a_run_stores_its_report_and_a_link_until_a_prompt_is_forgotten(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    job.train("report=true", "name=reported", "iterations=2")
    run = job.store / "reported"
    page = run / "report/report-0002.html"
    assert "<h1>Run reported</h1>" in page.read_text()
    with job.prefect():
        [link] = asyncio.run(links("reported-report"))
    assert link == f"[{page}]({page.as_uri()})"

    [prompt, *_] = re.findall(r'"prompt_id":"([0-9a-f]{16})"', page.read_text())
    (tmp_path / "ids").write_text(prompt)
    with job.prefect():
        from rheostat.flows.cli.app import main

        assert (
            main(["forget", "reported", "--prompt-ids", str(tmp_path / "ids"), "--delete", "--store", str(job.store)])
            == 0
        )
    assert not page.exists()
    assert list((run / "report").glob("*.png"))


def test_a_run_whose_directory_is_deleted_before_its_summary_does_not_create_the_directory_again(copied, monkeypatch):
    draw = reporting.learning_curves

    def delete_run(*arguments):
        shutil.rmtree(copied.run)
        return draw(*arguments)

    monkeypatch.setattr(reporting, "learning_curves", delete_run)
    with pytest.raises(StoreFailed, match=r"cannot write 'report/learning-curve-0003[.]png': .* was deleted"):
        copied.train()
    assert not copied.run.exists()


def test_a_report_shows_how_many_rows_of_problems_and_pairs_were_left_out_for_each_reason(tmp_path, prefect_api):
    problems = [*number_problems(4), {"prompt": " ", "answer": "1"}, {"prompt": str(7**400), "answer": "1"}]
    pairs = [{"prompt": f"Pair {n}?", "chosen": "a", "rejected": "b"} for n in range(4)]
    bad = [{"rejected": "a"}, {"chosen": ""}, {"chosen": "c" * 200}, {"chosen": "c" * 201}]
    train, heldout = (
        write_lines(tmp_path / "t.jsonl", *problems),
        write_lines(tmp_path / "h.jsonl", {"prompt": "How many?", "answer": "1"}),
    )
    chosen = write_lines(tmp_path / "p.jsonl", *pairs, *({**pairs[0], **each} for each in bad))
    others = write_lines(tmp_path / "q.jsonl", {"prompt": "Held out?", "chosen": "a", "rejected": "b"})
    job = InProcessJob(tmp_path, prefect_api)
    job.train(
        *("report=true", "name=dropping", "iterations=1", "warmup.steps=1", "dpo.steps=1", "dpo.batch_size=2"),
        *("policy.context=128", "rollout.prompts=2", "evaluation.problems=1"),
        f"data={{kind='file',path='{train}',heldout_path='{heldout}',drop=['empty','too_long']}}",
        f"preferences={{kind='file',path='{chosen}',heldout_path='{others}',drop=['ties','empty','too_long']}}",
    )
    page = (job.store / "dropping/report/report-0001.html").read_text()
    [table] = re.findall(r"\(`drop`\):</p>(.*?</table>)", page, re.DOTALL)
    rows = [tuple(re.findall(r"<td.*?>(.*?)</td>", row)) for row in table.split("<tr")]
    assert sorted(filter(None, rows)) == [
        ("policy/dpo", "empty", "1"),
        ("policy/dpo", "ties", "1"),
        ("policy/dpo", "too_long", "2"),
        ("prompts/train", "empty", "1"),
        ("prompts/train", "too_long", "1"),
    ]
