"""The runs of a sweep as the store knows them: what each differs in, what came of it."""

from collections.abc import Mapping, Sequence
from typing import Literal

from infra.config import Settings
from infra.store.runs import list_runs
from infra.untrusted_text import visible
from tasks.config.run import RunConfig
from tasks.views.metrics import Accuracy
from tasks.views.run_list import read_run_line
from tasks.views.runs import describe_run

SweptStatus = Literal["running", "done", "crashed", "stopped", "damaged", "failed", "not begun"]


class SweptRun(Settings):
    """One run of a sweep, as far as it is."""

    run: str
    """Name."""
    values: dict[str, str]
    """What it differs in."""
    accuracy: Accuracy | None
    """Held-out accuracy of its last policy; none where that is not measured yet."""
    seconds: float | None
    """From when it was made to what it last finished."""
    status: SweptStatus
    """Where it stands; `failed` in this call of the sweep."""
    error: str = ""
    """Why it failed."""

    def row(self, keys: Sequence[str]) -> dict[str, str]:
        """It as a row of a table."""
        found = self.accuracy
        held_out = "-" if found is None else f"{found.mean:.3f} ({found.low:.3f} to {found.high:.3f})"
        took = "-" if self.seconds is None else f"{self.seconds:,.0f} s"
        values = {key: visible(self.values.get(key, "")) for key in keys}
        return {"run": self.run, **values, "held-out accuracy": held_out, "took": took, "status": self.status}


def swept_run(config: RunConfig, values: Mapping[str, str], *, error: str) -> SweptRun:
    """Read from the store how far a run is."""
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
