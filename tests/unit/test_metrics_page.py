"""Names of metrics in docs/metrics.md: each name once, and no name that the code does not record."""

import re
from pathlib import Path

from rheostat.models.credit.assign import ENDINGS
from tests.support.pages import documented_metrics, is_documented

HOME = Path(__file__).parents[2]
RECORDED_IN = ("models", "tasks", "infra")


def test_the_metrics_page_names_each_metric_once():
    names = documented_metrics()
    assert len(names) > 90
    assert sorted(names) == sorted(set(names))


def is_in_code(quantity: str, code: str) -> bool:
    """Return whether code contains a quantity as a word, or as an f-string if it has parts in angle brackets."""
    pattern = re.sub(r"<\w+>", r"\\{[^}]+\\}", quantity)
    return re.search(rf"(?<!\w){pattern}(?!\w)", code) is not None


def test_the_metrics_page_names_no_metric_that_the_code_does_not_record():
    code = "\n".join(path.read_text() for folder in RECORDED_IN for path in (HOME / folder).rglob("*.py"))
    endings = {f"ended_{reason.value}_fraction" for reason in ENDINGS}  # written by one f-string
    quantities = [name.rpartition("/")[2] for name in documented_metrics()]
    assert endings < {*quantities}
    assert [quantity for quantity in quantities if quantity not in endings and not is_in_code(quantity, code)] == []


def test_placeholders_in_the_metrics_page_match_names():
    assert is_documented("credit/term_numeric_mean")
    assert is_documented("eval/pass_at_8")
    assert not is_documented("credit/term_numeric_median")
