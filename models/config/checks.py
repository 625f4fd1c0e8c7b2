"""Result of the check of a run's inputs, which one process prints and another one reads. Torch-free."""

from infra.config import Settings


class CheckResult(Settings):
    """Findings of the check of a run's inputs."""

    facts: dict[str, float]
    """Numbers counted and estimated by the check, such as numbers of problems. Bytes are per worker."""
    notes: tuple[str, ...] = ()
    """Sentences for the plan about texts that are read differently than a user may expect."""
