"""Whole runs that are killed, or have other workers, and end as the undisturbed run: the cases of runs.toml.

Some cases also have `pytest.mark.smoke` or, if they take minutes, `pytest.mark.slow`.
"""

import functools
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.chaos import Strike, attempt, run_driver
from tests.support.in_process import InProcessJob
from tests.support.jobs import KILL_DRIVER, PATIENCE, Fault, Job, bundles_of, manifest_of
from tests.support.processes import process
from tests.support.whole_runs import Case, Family, check_same_run, copy_until, read_cases

pytestmark = [pytest.mark.system, pytest.mark.timeout(2000)]


@pytest.mark.parametrize(("family", "case"), read_cases())
def test_a_run_ends_as_the_undisturbed_run_of_its_family(family: Family, case: Case, tmp_path, together, prefect_api):
    undisturbed = family.undisturbed(together, prefect_api).run
    job = Job(tmp_path, prefect_api, counts_works=True)
    job.configured()
    if case.begins:
        copy_until(undisturbed, job.run, iteration=case.begins)
    overrides = (*family.settings(together), *case.overrides)
    if case.on == "threads":
        run_on_threads(case, job, undisturbed, overrides)
    else:
        run_on_ray(case, job, overrides)
    check_same_run(job.run, undisturbed)
    assert case.repeats is None or case.repeats[0] <= job.repeats() <= case.repeats[1], job.works()
    retaken = output_of(job).count("is computed again from its stored samples")
    assert case.retaken is None or retaken in case.retaken
    for command in case.commands:
        ended = InProcessJob(job.home, prefect_api).command(command)
        assert ended.code == 0, ended.output


def run_on_threads(case: Case, job: Job, undisturbed: Path, overrides: Sequence[str]) -> None:
    """Start a job whose workers are threads once for each kill, and once without a kill. Each kill must happen."""

    def name_of(named: re.Match[str]) -> str:
        key, part = named.groups()
        if part.isdigit():
            return manifest_of(undisturbed, key)["shards"][int(part)]["key"]
        return bundles_of(undisturbed, key)[part].relative_to(undisturbed).as_posix()

    strikes = [Strike(re.sub(r"\{(\S+) (\w+)\}", name_of, file), moment) for moment, file in case.kills]
    for strike in (*strikes, None):
        if strike is not None and (job.run / strike.write).exists():
            continue  # rollouts may be written before or after the commit of the update before them
        with process(functools.partial(attempt, job=()), job.home, job.api, strike, overrides) as child:
            child.join(PATIENCE)
        assert child.exitcode == (0 if strike is None else strike.code), f"{strike}: {output_of(job)[-3000:]}"


def run_on_ray(case: Case, job: Job, overrides: Sequence[str]) -> None:
    """Start a job with processes of Ray once for each list of faults, until the driver is not killed."""
    starts = [*case.starts, *([()] if not case.starts or kills_driver(case.starts[-1]) else [])]
    for number, faults in enumerate(starts):
        job.plant(faults)
        own = case.start_overrides[number] if case.start_overrides else ()
        code = run_driver(job, "train", *overrides, *own)
        assert code == (-signal.SIGKILL if kills_driver(faults) else 0), f"start {number + 1}: {output_of(job)[-3000:]}"
        assert job.struck() == len(faults), f"start {number + 1}: {faults}"


def kills_driver(faults: Sequence[Fault]) -> bool:
    return any(each.signal == KILL_DRIVER or (each.role, each.signal) == ("driver", signal.SIGKILL) for each in faults)


def output_of(job: Job) -> str:
    return (job.home / "output").read_text(errors="replace")
