"""CPU seconds per test: `--cpu-seconds MIN` lists the tests that used at least this number, with all their processes.

The time of a whole run counts for the test whose fixtures started it.
"""

import os
from contextlib import suppress

import psutil
import pytest

from rheostat.infra.processes.clock import process_tree

NAME = "cpu_seconds"


def used() -> float:
    """Return the CPU seconds so far of this process, of its ended children, and of its running descendants."""
    seconds = 0.0
    for pid in process_tree(os.getpid()):
        with suppress(psutil.Error):
            seconds += sum(psutil.Process(pid).cpu_times()[:4])  # user, system, and both of children waited for
    return seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--cpu-seconds", type=float, metavar="LEAST", help="list tests by the CPU seconds that they took")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """Measure a test with its fixtures, from the end of the test before it; the last of its reports has the seconds."""
    if item.config.getoption("--cpu-seconds") is not None and MEASURED not in item.config.stash:
        item.config.stash[MEASURED] = used()
    return (yield)


MEASURED = pytest.StashKey[float]()
"""CPU seconds until the end of the test that ended last. Measuring takes a millisecond."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """Add the seconds to the report of the test's end."""
    if call.when == "teardown" and MEASURED in item.config.stash:
        before, item.config.stash[MEASURED] = item.config.stash[MEASURED], used()
        item.user_properties.append((NAME, item.config.stash[MEASURED] - before))
    return (yield)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """List the tests, those with most CPU seconds first."""
    least = config.getoption("--cpu-seconds")
    if least is None or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    ended = [
        report
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
    ]
    taken = {r.nodeid: dict(r.user_properties)[NAME] for r in ended if NAME in dict(r.user_properties)}
    terminalreporter.section(f"{sum(taken.values()):.0f} CPU seconds; tests with at least {least:g}")
    for name, seconds in sorted(taken.items(), key=lambda item: -item[1]):
        if seconds >= least:
            terminalreporter.line(f"{seconds:7.1f}  {name}")
