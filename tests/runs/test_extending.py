"""A whole run with an algorithm, a loss, an engine, data, a placement policy and a reward from elsewhere."""

import json

import pytest

from tests.support.jobs import Job
from tests.support.pages import EXTENDING, files_of, write_page

pytestmark = pytest.mark.timeout(1200)


def test_the_job_of_the_page_on_extending_trains_with_all_that_it_brings(tmp_path, prefect_api):
    write_page(EXTENDING, tmp_path)
    job = Job(tmp_path / "job", prefect_api, document=files_of(EXTENDING)["mine.toml"], path=tmp_path)
    ended = job.train("name=tiny")
    assert ended.code == 0, ended.output
    policies = [json.loads((job.run / f"manifests/{key}.json").read_text()) for key in ("policy/initial", *UPDATES)]
    assert len({made["bundles"]["weights"]["digest"] for made in policies}) == 3
    checked = job.command("verify")
    assert checked.code == 0, checked.output


UPDATES = ("it-0001/update", "it-0002/update")
