"""A run ends with a report in its store and a link to it in Prefect's artifacts."""

import asyncio
import re

import pytest
from prefect import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

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
        from flows.cli.app import main

        assert (
            main(["forget", "reported", "--prompt-ids", str(tmp_path / "ids"), "--delete", "--store", str(job.store)])
            == 0
        )
    assert not page.exists()
    assert list((run / "report").glob("*.png"))
