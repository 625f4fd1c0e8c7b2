"""Skips tests if bubblewrap does not work here, unless `RHEOSTAT_REQUIRE_SANDBOX` is set: then they fail."""

import os

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.sandbox import check_sandbox


def missing_sandbox() -> str:
    """Return why bubblewrap does not work here, or an empty text if it works."""
    try:
        check_sandbox("this test")
    except BadInput as error:
        return str(error)
    return ""


MISSING = missing_sandbox()
needs_sandbox = pytest.mark.skipif(bool(MISSING) and "RHEOSTAT_REQUIRE_SANDBOX" not in os.environ, reason=MISSING)
