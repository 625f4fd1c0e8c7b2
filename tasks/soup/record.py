"""Stored result of a soup: an immutable record that lists the trained policies and their evaluation. A policy for any
preference can be merged from it."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from rheostat.infra.config import Settings, fingerprint_of
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.checksums import SealedRecord
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.store.numbered import NumberedRecords
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.storage import open_store
from rheostat.models.config.soup import SOUPS, SoupMethod
from rheostat.models.records.merges import Parent, start_of
from rheostat.models.records.versions import policy_of
from rheostat.models.soup.front import FrontMetrics, measure_front
from rheostat.models.soup.mixing import check_preference, compute_backbone_weights, extrapolate_weights, mixing_matrix
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.promotion.registry import timestamp
from rheostat.tasks.promotion.suites import policy_directory
from rheostat.tasks.run.dependencies import dependencies_of
from rheostat.tasks.run.reverts import policy_after
from rheostat.tasks.soup.merging import MergedPolicy, write_merged
from rheostat.tasks.soup.parts import (
    PreferencePoint,
    Statistics,
    backbone_runs,
    evaluation_run,
    expert_runs,
    oracle_runs,
    rewards_of,
    soup_settings,
    start_run,
)


class SoupPart(Settings):
    """Policy that was trained for a soup, with the location of its files."""

    run: str
    """Name of the run that trained the policy."""
    path: str
    """Directory with the files of the policy, or of its adapter if the policy has one."""
    digest: str
    """Digest of the policy's weights."""


class SoupPoint(Settings):
    """Policy for one preference with its measured rewards."""

    preference: tuple[float, ...]
    weights: tuple[float, ...]
    """Weights with which the backbones (policies trained on mixes of rewards) are merged. Empty if the policy was
    trained for the preference (expert or oracle)."""
    run: str
    """Name of the run that evaluated the policy."""
    rewards: tuple[float, ...]
    """Mean of each reward term on the held-out problems."""
    standardised: tuple[float, ...]
    """Mean of each reward term, in standard deviations above its mean under the start policy."""

    @property
    def value(self) -> float:
        """Quality of the policy for its preference: the sum Σ μ_i R_i over preference weights μ and standardized
        rewards R."""
        return sum(share * reward for share, reward in zip(self.preference, self.standardised, strict=True))


class SoupRecord(SealedRecord):
    """Result of a soup: everything that is needed to merge a policy for a preference, and how good the policies are."""

    label = "record of a soup"

    name: str
    number: int
    """Number of this record among the records of the soup, counted from 1."""
    fingerprint: str
    """Fingerprint of the configuration, including the soup's settings. A soup with an equal fingerprint is not recorded
    again."""
    when: str
    """Creation time of the record, UTC, in ISO format."""
    method: SoupMethod
    terms: tuple[str, ...]
    beta: float
    matrix: tuple[tuple[float, ...], ...]
    """Mix of rewards of each backbone: row j has the reward weights that backbone j was trained on."""
    candidates: dict[str, float]
    """Hypervolume of the measured rewards for each β that was tried. Empty if the soup did not search for
    the best β."""
    extrapolate: float
    rewards: JsonValue
    """Reward terms as configured."""
    code: dict[str, dict[str, str]]
    """Digests of the source files of user-defined rewards and other code that the configuration names, by module."""
    statistics: Statistics
    start: SoupPart
    backbones: tuple[SoupPart, ...]
    """Backbones in the order of the rewards. With method "oracle", the policies in the order of `points`."""
    experts: tuple[SoupPart, ...]
    """Policies that were trained on a single reward. They are used for preferences for this reward only. Empty if
    merges are used for such preferences."""
    points: tuple[SoupPoint, ...]
    metrics: FrontMetrics


def choose_beta(
    config: RunConfig, statistics: Statistics, points: dict[float, list[PreferencePoint]]
) -> dict[float, float]:
    """Rank the tried values of β by the hypervolume of their measured rewards, and return these hypervolumes, largest
    first. Equal values keep the order of `points`."""
    volumes = {beta: measure_points(config, statistics, each)[1].hypervolume for beta, each in points.items()}
    return dict(sorted(volumes.items(), key=lambda item: -item[1]))


def measure_points(
    config: RunConfig, statistics: Statistics, points: Sequence[PreferencePoint]
) -> tuple[tuple[SoupPoint, ...], FrontMetrics]:
    """Read the measured rewards of each evaluated policy, and compute quality metrics over all preferences (such as the
    hypervolume)."""
    soup, measured_points = soup_settings(config), []
    for point in points:
        evaluation = evaluation_run(config, point)
        rewards = rewards_of(config, evaluation)
        measured_points.append(
            SoupPoint(
                preference=point.preference,
                weights=point.weights,
                run=evaluation.name,
                rewards=rewards,
                standardised=statistics.standardised(rewards),
            )
        )
    metrics = measure_front(
        [each.preference for each in measured_points],
        [each.standardised for each in measured_points],
        [soup.reference] * len(soup.terms),
    )
    return tuple(measured_points), metrics


def commit_soup(
    config: RunConfig,
    statistics: Statistics,
    points: Sequence[PreferencePoint],
    *,
    beta: float,
    candidates: dict[float, float],
) -> SoupRecord:
    """Record a soup after all its policies are trained and evaluated. If a soup with the same fingerprint is recorded
    already, return its record."""
    soup, numbered = soup_settings(config), soup_records(config.store, config.name)
    identity: dict[str, JsonValue] = {
        "run": config.identity(),
        "iterations": config.iterations,
        "soup": soup.as_recorded(),
    }
    fingerprint = fingerprint_of(identity)
    measured_points, metrics = measure_points(config, statistics, points)
    oracle = soup.method == "oracle"
    runs = oracle_runs(config, statistics) if oracle else backbone_runs(config, statistics, beta)
    record = SoupRecord(
        name=config.name,
        number=1,
        fingerprint=fingerprint,
        when=timestamp(),
        method=soup.method,
        terms=soup.terms,
        beta=beta,
        matrix=tuple(tuple(row) for row in mixing_matrix(len(soup.terms), beta).tolist()),
        candidates={f"{each:g}": volume for each, volume in candidates.items()},
        extrapolate=soup.extrapolate,
        rewards=config.scoring.model_dump(mode="json")["rewards"],
        code=dependencies_of(config).code,
        statistics=statistics,
        start=_describe_part(start_run(config)),
        backbones=tuple(map(_describe_part, runs)),
        experts=tuple(map(_describe_part, expert_runs(config, statistics))),
        points=measured_points,
        metrics=metrics,
    )
    while True:
        known = _read_records(numbered)
        if (same := next((each for each in known if each.fingerprint == fingerprint), None)) is not None:
            return same
        numbered_record = record.model_copy(update={"number": len(known) + 1})
        if numbered.put(numbered_record.number, numbered_record.seal()):
            return numbered_record


def latest_records(store: str, name: str) -> list[SoupRecord]:
    """Return the newest record of each method that a soup was computed with. Raises BadInput with the known soups if
    the name is unknown."""
    names = list_soups(store)
    if name not in names:
        raise BadInput(f"There is no soup {name!r} in {store!r}. Existing soups: {', '.join(names) or 'none'}")
    return list({record.method: record for record in _read_records(soup_records(store, name))}.values())


def soup_policy(
    store: str, name: str, preference: Sequence[float], target: Path, *, method: SoupMethod | None = None
) -> MergedPolicy:
    """Write the policy for a preference to a new directory, merged or copied as the soup's method requires.

    Raises BadInput if `method` is missing although the soup has records of several methods, or if the preference is
    invalid.
    """
    known = sorted(latest_records(store, name), key=lambda record: record.number)
    chosen = [record for record in known if method in (None, record.method)]
    if len(chosen) != 1:
        methods = " or ".join(record.method for record in known)
        raise BadInput(
            f"soup {name!r}: --method must be {methods}, the methods with which it was trained, found "
            f"{method or 'no method'}."
        )
    record = chosen[0]
    check_preference(preference, len(record.terms))
    description: JsonValue = {
        "soup": record.name,
        "method": record.method,
        "terms": [*record.terms],
        "preference": [*preference],
        "beta": record.beta,
        "matrix": [[*row] for row in record.matrix],
        "rewards": record.rewards,
        "code": {name: {**modules} for name, modules in record.code.items()},
        "statistics": record.statistics.model_dump(mode="json"),
        "fingerprint": record.fingerprint,
    }
    parents = tuple(
        Parent(part.run, fetch_path(Path(part.path)), weight, start_of(Path(part.path)))
        for part, weight in _weight_parts(record, preference)
        if abs(weight) > 1e-12
    )
    return write_merged(parents, target, soup=description)


def _weight_parts(record: SoupRecord, preference: Sequence[float]) -> list[tuple[SoupPart, float]]:
    """Return the policies to merge for a preference, with their weights. A single policy has the weight 1."""
    if record.method == "oracle":
        for point, part in zip(record.points, record.backbones, strict=True):
            if max(abs(a - b) for a, b in zip(point.preference, preference, strict=True)) < 1e-6:
                return [(part, 1.0)]
        raise BadInput(
            f"soup {record.name!r}: method 'oracle' has a policy only for the preferences of its grid. Choose one of "
            "them, or use another method."
        )
    if record.experts and max(preference) > 1 - 1e-6:
        return [(record.experts[[*preference].index(max(preference))], 1.0)]
    weights, of_start = extrapolate_weights(
        compute_backbone_weights(record.method, preference, record.beta), record.extrapolate
    )
    return [*zip(record.backbones, weights, strict=True), (record.start, of_start)]


def list_soups(store: str) -> list[str]:
    """Return the names of all soups in a store."""
    return open_store(store).children(SOUPS)


def soup_records(store: str, name: str) -> NumberedRecords:
    """Return access to the stored records of a soup, which are numbered from 1. There are none before the soup is
    finished."""
    return NumberedRecords(open_store(f"{store.rstrip('/')}/{SOUPS}/{name}"), f"soup {name!r}")


def verify_soup(store: str, name: str) -> list[str]:
    """Check all records of a soup for damage. Return one line per problem, or an empty list."""
    numbered = soup_records(store, name)
    try:
        _read_records(numbered)
    except (Damaged, BadInput) as error:
        return [str(error)]
    return [*numbered.check_chain()]


def _read_records(numbered: NumberedRecords) -> list[SoupRecord]:
    """Return all records of a soup in order. Raises Damaged if one is missing, incomplete or replaced."""
    return [
        SoupRecord.unseal(content, where=f"{numbered.where}: record {number}")
        for number, content in enumerate(numbered.read(), start=1)
    ]


def _describe_part(run: RunConfig) -> SoupPart:
    policy = policy_of(policy_after(open_run(run.store, run.name), run.iterations))
    return SoupPart(run=run.name, path=policy_directory(run, run.iterations), digest=policy.digest)
