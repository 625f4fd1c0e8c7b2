"""What is asked to be made of a run's stored rollouts: read, and checked against the run before anything is written."""

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from flows.complaints import explain, nearest
from flows.config import RunConfig, override_config
from flows.reading import open_known_run
from infra.config import Settings
from infra.errors import BadInput
from infra.runs import Run
from models.rewards.config import ScoringConfig
from placement.config import ColocatedPlacement
from tasks.derived import RescoringTerms, check_rescoring
from tasks.reports import sealed_iterations

M = TypeVar("M", bound=BaseModel)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


class Rescoring(Settings):
    """Iterations of a run that are to be scored again."""

    config: RunConfig
    """The run's own configuration with the new rewards."""
    name: str
    """Name of the re-scoring."""
    iterations: tuple[int, ...]
    """Which iterations."""


def request_rescoring(
    store: str,
    run_name: str,
    *,
    rewards: str,
    name: str | None,
    iterations: str | None,
    overrides: Sequence[str],
) -> Rescoring:
    """Read a request on the command line. Raises BadInput in one line; nothing is written."""
    run = open_known_run(store, run_name)
    terms = parse_part(rewards, RescoringTerms, part="scoring", what="--rewards")
    chosen = checked_name(name) if name is not None else f"{terms.scoring.terms[0]}-{digest_of(terms)}"
    config = rescoring_config(run, store, terms.scoring, overrides)
    request = Rescoring(config=config, name=chosen, iterations=parse_iterations(iterations, run))
    check_rescoring(run, chosen, terms)
    return request


def rescoring_config(run: Run, store: str, scoring: ScoringConfig, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run with other rewards; what its rollouts were made by does not need to go with them."""
    config = _configuration(run, store, overrides)
    slots, workers = sum(reward.slots for reward in scoring.local.values()), config.pools.workers
    if slots > workers:
        raise BadInput(f"pools.workers {workers}: the reward models take at least {slots} slots; add pools.workers=…")
    dynamic = config.rollout.dynamic
    if dynamic is not None and dynamic.metric not in scoring.terms:
        dynamic = dynamic.model_copy(update={"metric": None})
    rollout = config.rollout.model_copy(update={"dynamic": dynamic})
    return config.model_copy(update={"scoring": scoring, "rollout": rollout, "placement": ColocatedPlacement()})


def _configuration(run: Run, store: str, overrides: Sequence[str]) -> RunConfig:
    for override in overrides:
        if not override.startswith("pools."):
            raise BadInput(f"override {override!r}: of a stored run only pools.* can be changed")
    document = {**run.record.config, "name": run.name, "store": store}
    return override_config(document, overrides, source=f"run {run.name}")


def parse_part(text: str, model: type[M], *, part: str, what: str) -> M:
    """Read one table of a configuration: the table in a TOML file, or its keys as inline TOML."""
    path = Path(text)
    inline = "=" in text and not path.is_file()
    if not inline and not path.is_file():
        raise BadInput(f"{what} {text!r}: expected a TOML file, or inline TOML with '='; no such file")
    try:
        document: dict[str, object] = tomllib.loads(text if inline else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{what} {text!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{what} {text!r} is not TOML: {error}") from None
    source = what if inline else f"{what} {text}"
    return parse_model(_part_of(document, model, part, source), model, source=source)


def _part_of(document: Mapping[str, object], model: type[BaseModel], part: str, source: str) -> dict[str, object]:
    """The part alone; the document may be a whole configuration, or the part's own keys."""
    if part in document:
        return {part: document[part]}
    whole = set(document) & set(RunConfig.model_fields)
    if not document or whole:
        raise BadInput(
            f"{source}: expected a table [{part}], found {', '.join(document) or 'nothing'}{nearest(part, [*document])}"
        )
    return {part: dict(document)}


def parse_model(document: Mapping[str, object], model: type[M], *, source: str) -> M:
    """Validate, with what is wrong in one line."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{source}: {explain(error, model)}") from None


def parse_iterations(text: str | None, run: Run) -> tuple[int, ...]:
    """Read `3`, `3-7` or `1,3-5`; none are all sealed iterations. Raises BadInput for one that is not sealed."""
    sealed = len(sealed_iterations(run))
    if not sealed:
        raise BadInput(f"run {run.name!r} has no sealed iteration yet")
    if text is None:
        return tuple(range(1, sealed + 1))
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise BadInput(f"--iterations {text!r}: expected such as 3, 3-7 or 1,3-5, found {part.strip()!r}")
        if first < 1 or last > sealed:
            raise BadInput(f"--iterations {text!r}: run {run.name!r} has the sealed iterations 1 to {sealed}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def checked_name(name: str) -> str:
    """A name that can be part of a manifest's key."""
    if not NAME.fullmatch(name) or ".." in name:
        raise BadInput(f"--as {name!r}: expected at most 64 of a-z 0-9 . _ - without '..', beginning with a-z 0-9")
    return name


def digest_of(terms: BaseModel) -> str:
    """What tells some rewards or algorithms from others: 8 hex digits."""
    document: JsonValue = terms.model_dump(mode="json")
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=4).hexdigest()
