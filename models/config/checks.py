"""Checks of a run's inputs that the parts of its configuration bring, and the result of the checks. Torch-free."""

from collections.abc import Iterator
from typing import Any, Final, Literal, Protocol, cast, get_args

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import check_function, find_target, nearest_name

Stage = Literal["settings", "problems", "policy", "models", "endpoints", "machine"]
"""Stage of the check of a run's inputs, in the order of the stages: settings alone, the problems, the policy's files
with the tokenizer, the files of other models, the endpoints that must respond, and this machine."""
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)


class CheckResult(Settings):
    """Findings of the check of a run's data, policy and rewards before the run starts."""

    facts: dict[str, float] = {}
    """Numbers that the check counted or estimated, by name, such as the number of problems. Memory is in bytes per
    worker."""
    notes: tuple[str, ...] = ()
    """Sentences that the plan prints about data that is read differently than a user may expect."""


class Check(Protocol):
    """Function that checks one part of a run's configuration. The class variable `checks` of the part names it."""

    def __call__(self, part: Any, facts: Any, where: str, /) -> CheckResult | None:  # noqa: ANN401 -- own settings
        """Return the findings about `part`, if any. `facts` is the `rheostat.models.inspection.facts.InputFacts` of the
        run, and `where` is the name of the part in messages. Raises BadInput if the run cannot start with the part."""
        ...


def find_checks(part: Settings, stage: Stage) -> Iterator[str]:
    """Yield the import strings of the functions that check a part in a stage: those of its base classes first. Raises
    BadInput if a user's class names an unknown stage."""
    for base in reversed(type(part).__mro__):
        checks = base.__dict__.get("checks", {})
        for name in checks:
            if name not in STAGES:
                raise BadInput(
                    f"{base.__module__}:{base.__qualname__}: checks has the key {name!r}, which is no stage"
                    f"{nearest_name(name, STAGES)}. Use {', '.join(STAGES)}"
                )
        if stage in checks:
            yield checks[stage]


def load_check(path: str, *, where: str) -> Check:
    """Import a function that checks a part of the configuration. Raises BadInput if it cannot be imported or called as
    a `Check`."""
    check_function(path, "part", "facts", "where", where=f"{where}: check {path!r}")
    return cast(Check, find_target(path, where=where))
