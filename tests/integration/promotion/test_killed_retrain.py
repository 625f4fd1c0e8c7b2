"""A retrain whose process is killed at every step in turn ends with the record and policy of an undisturbed one."""

import signal

import pytest

from rheostat.infra.store.registry import open_registry
from tests.support.chaos import run_driver
from tests.support.jobs import SMALLEST, TINY, Fault, Job, leftovers_of, manifests_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

GATED = """
[[evaluations]]
name = "sums"
data = {kind = "target", target = "arithmetic:ArithmeticData", options = {heldout_problems = 30}}
problems = 30
[promotion]
registry = "assistant"
primary = {suite = "sums", min_gain = -1}
"""

STEPS = (
    ("after", r"/registry/assistant/retrains/"),
    ("before", r"/tiny-20261102\.sums\.initial/manifests/eval-0000/summary"),
    ("after", r"/tiny-20261102\.sums\.challenger/manifests/eval-0000/summary"),
    ("after", r"/registry/assistant/learnt/"),
    ("after", r"/registry/assistant/policies/.*/bundle\.json"),
    ("before", r"/registry/assistant/records/"),
    ("after", r"/registry/assistant/records/"),
)
"""Writes of the driver's process, with the side on which it is killed, in the order of the retrain."""


def repeat_retrain(home, api, faults=()):
    """Repeat the retrain until it ends without a kill. Return the job and the exit code of each start."""
    job = Job(home, api, document=TINY + GATED)
    job.configured()
    job.plant(faults)
    codes = []
    while not codes or codes[-1]:
        code = run_driver(job, "retrain", "--day", "2026-11-02", "iterations=1", "pools.cluster=threads", *SMALLEST)
        assert code in (0, -signal.SIGKILL), (home / "output").read_text()
        codes.append(code)
    return job, codes


def test_a_retrain_killed_at_every_step_ends_with_the_same_record_and_policy(tmp_path, prefect_api):
    quiet, _ = repeat_retrain(tmp_path / "quiet", prefect_api)
    job, codes = repeat_retrain(tmp_path / "killed", prefect_api, [Fault("driver", *step) for step in STEPS])
    assert codes == [-signal.SIGKILL] * len(STEPS) + [0]
    [expected], [record] = (open_registry(str(each.store), "assistant").records() for each in (quiet, job))
    passing = {"when": ""}
    assert record.model_copy(update=passing) == expected.model_copy(update=passing)
    assert record.kind == "promote"
    assert [path.name for path in (job.store / "registry/assistant/policies").iterdir()] == [
        record.bundle.key.rpartition("/")[2]
    ]
    assert manifests_of(job.store / "tiny-20261102") == manifests_of(quiet.store / "tiny-20261102")
    assert not leftovers_of(job.store)
