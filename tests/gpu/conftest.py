"""Fixtures of the tests on a GPU, and the table of their results that `make test-gpu` prints at the end.

A test gives its row of the table with `record_property`: `part` is what it proves, and `figure` what it measured.
"""

from pathlib import Path

import pytest
import torch

from rheostat.models.records.versions import ModelVersion
from tests.support.training import publish_scratch

_ROWS = pytest.StashKey[list[tuple[str, str, str]]]()


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Fail without a GPU. A skipped test would prove nothing and yet pass."""
    assert torch.cuda.is_available(), "expected a CUDA GPU that PyTorch can use"


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def policy(uri: str) -> ModelVersion:
    return publish_scratch(f"{uri}/run", Path(uri, "scratch"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if report.when == "call" and Path(__file__).parent in item.path.parents:
        properties = dict(item.user_properties)
        part = str(properties.get("part", item.name))
        item.config.stash[_ROWS].append((part, report.outcome, str(properties.get("figure", ""))))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table of results."""
    if rows := config.stash[_ROWS]:
        properties = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
        device = "no GPU" if properties is None else f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        terminalreporter.section(f"{device}, torch {torch.__version__}")
        width = max(len(part) for part, *_ in rows)
        for part, outcome, figure in rows:
            terminalreporter.write_line(f"{part:{width}}  {outcome:7}  {figure}".rstrip())
