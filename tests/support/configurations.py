"""Configurations that are accepted or refused."""

import pytest

from rheostat.infra.errors import BadInput
from rheostat.tasks.config.run import RunConfig, override_config
from tests.support.demos import ARITHMETIC


def refusal(*overrides: str) -> str:
    """Return the single line of the error for a combination of settings."""
    with pytest.raises(BadInput) as refused:
        override_config({"data": ARITHMETIC}, overrides, source="run.toml")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def accepted(*overrides: str) -> RunConfig:
    return override_config({"data": ARITHMETIC}, overrides, source="run.toml")
