"""Status and results of the runs of a sweep, read from the store."""

from collections.abc import Mapping, Sequence
from typing import Literal

from rheostat.infra.config import Settings
from rheostat.infra.store.runs import list_runs
from rheostat.infra.untrusted_text import make_visible
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.views.metrics import Accuracy
from rheostat.tasks.views.run_list import read_run_line
from rheostat.tasks.views.runs import describe_run

SweptStatus = Literal["running", "done", "crashed", "stopped", "damaged", "failed", "not begun"]


class SweptRun(Settings):
    """One run of a sweep with its settings and its result so far."""

    run: str
    """Name of the run."""
    values: dict[str, str]
    """Values of the settings in which this run differs from the others, by dotted key."""
    accuracy: Accuracy | None
    """Held-out accuracy of the run's last policy, or None if it is not measured yet."""
    seconds: float | None
    """Seconds from the creation of the run to its last completed iteration or evaluation, or None before."""
    status: SweptStatus
    """Status of the run. `failed` means that the run failed in this call of `rheostat sweep`."""
    error: str = ""
    """Reason of the failure or damage. Empty otherwise."""

    def row(self, keys: Sequence[str]) -> dict[str, str]:
        """Return the cells of the run in the table of the sweep, with one column for each key in `keys`."""
        accuracy = self.accuracy
        held_out = "-" if accuracy is None else f"{accuracy.mean:.3f} ({accuracy.low:.3f} to {accuracy.high:.3f})"
        duration = "-" if self.seconds is None else f"{self.seconds:,.0f} s"
        values = {key: make_visible(self.values.get(key, "")) for key in keys}
        return {"run": self.run, **values, "held-out accuracy": held_out, "took": duration, "status": self.status}


def swept_run(config: RunConfig, values: Mapping[str, str], *, error: str) -> SweptRun:
    """Read the status and the result of one run of a sweep from the store. `error` is the reason if the run
    has failed."""
    if config.name not in list_runs(config.store):
        status: SweptStatus = "failed" if error else "not begun"
        return SweptRun(run=config.name, values=dict(values), accuracy=None, seconds=None, status=status, error=error)
    line = read_run_line(config.store, config.name)
    evaluations = [] if line.damage else describe_run(config.store, config.name).evaluations
    return SweptRun(
        run=config.name,
        values=dict(values),
        accuracy=evaluations[-1] if evaluations and evaluations[-1].number == line.iterations else None,
        seconds=line.seconds,
        status="failed" if error else line.status,
        error=error or line.damage or "",
    )
