"""Whether bubblewrap can be had here; where `RHEOSTAT_REQUIRE_SANDBOX` says that it must, tests without it fail."""

import os

import pytest

from infra.errors import BadInput
from infra.processes.sandbox import check_sandbox


def missing_sandbox() -> str:
    """Say what keeps bubblewrap from working here; "" if nothing."""
    try:
        check_sandbox("this test")
    except BadInput as error:
        return str(error)
    return ""


MISSING = missing_sandbox()
needs_sandbox = pytest.mark.skipif(bool(MISSING) and "RHEOSTAT_REQUIRE_SANDBOX" not in os.environ, reason=MISSING)
