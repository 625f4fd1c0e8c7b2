"""Results of `make test-models` by family: stored as soon as they are known, and printed as a table at the end."""

import os

from tests.models.page import RESULTS, format_results, read_results, write_results

_results: dict[str, str] = {}


def pytest_runtest_logreport(report):
    """Store the result of a family. Parallel test processes only report to the first process, which stores."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    properties = dict(report.user_properties)
    if "family" in properties and report.when == "call":
        result = properties.get("result", "FAILED") if report.passed else "FAILED"
        _results[properties["family"]] = result
        write_results(read_results() | {properties["family"]: result})


def pytest_terminal_summary(terminalreporter):
    """Print the results of this session."""
    if _results:
        terminalreporter.section("families of models")
        terminalreporter.write_line(format_results(_results))
        terminalreporter.write_line(f"stored in {RESULTS}; `make models-page` writes them to docs/models.md")
