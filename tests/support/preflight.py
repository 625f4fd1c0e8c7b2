"""The check before a run, of the job in the current directory."""

from pathlib import Path

from rheostat.models.commands.preflight import Inputs, check
from rheostat.tasks.config.run import load_config


def read_inputs(*overrides: str) -> Inputs:
    """Return the input of the check for `job.toml` with overrides."""
    return Inputs.model_validate_json(load_config(Path("job.toml"), overrides).model_dump_json())


def check_job(*overrides: str) -> dict[str, float]:
    """Check `job.toml` with overrides; return the facts about the job."""
    return check(read_inputs(*overrides)).facts
