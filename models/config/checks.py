"""Result of the check of a run's inputs, which one process prints and another one reads. Torch-free."""

from rheostat.infra.config import Settings


class CheckResult(Settings):
    """Findings of the check of a run's data, policy and rewards before the run starts."""

    facts: dict[str, float]
    """Numbers that the check counted or estimated, by name, such as the number of problems. Memory is in bytes per
    worker."""
    notes: tuple[str, ...] = ()
    """Sentences that the plan prints about data that is read differently than a user may expect."""
