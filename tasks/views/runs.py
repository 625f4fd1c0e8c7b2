"""What the commands that read show of runs and of their re-scorings; needs neither Prefect's API nor a worker."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from infra.config import Settings, read_recorded
from infra.costs import Cost
from infra.errors import BadInput, Damaged, RheostatError
from infra.store.dependencies import AcceptedChange, accepted_changes
from infra.store.garbage import tags_of
from infra.store.manifests import Manifest
from infra.store.run_record import RECORD
from infra.store.runs import Run, list_runs, open_run
from infra.store.shards import read_metadata
from infra.store.storage import is_key, open_store
from infra.store.tombstones import Tombstone, find_tombstone
from infra.validation_errors import nearest
from models.config.rewards import ScoringConfig
from models.records.media import Media, ShownImage
from models.records.versions import directory_of, policy_of
from models.rollouts.preview import RolloutPreview, read_samples
from tasks.run.batch import check_rollouts_kept, pictures_of, rollouts_of, rollouts_under, without_rollouts
from tasks.run.keys import PROMPTS, StageKey, iteration_key, iterations_among
from tasks.run.rescorings import Derived, DerivedLine, derived_of
from tasks.run.returns import policy_key
from tasks.views.metrics import (
    Accuracy,
    IterationReport,
    evaluations_of,
    report_of,
    reports_of,
    run_costs,
    sealed_iterations,
)


def sample_rollouts(
    run: Run, iteration: int, *, limit: int, order: Literal["reward", "length", "position"] = "position"
) -> list[RolloutPreview]:
    """Read completions of one iteration. By position only as many shards and rows are read as `limit` needs."""
    check_rollouts_kept(run, [iteration])
    rollouts = rollouts_of(run, iteration)
    if not rollouts:
        begun = [iteration_key(number) for number in iterations_among(run.folders()) if rollouts_of(run, number)]
        found = f"iterations {begun[0]} to {begun[-1]}" if begun else "none yet"
        raise BadInput(f"run {run.name!r} has no rollouts of iteration {iteration}, found {found}")
    samples: list[RolloutPreview] = []
    for manifest in rollouts:
        samples += _read(run, manifest, iteration, limit=limit - len(samples) if order == "position" else None)
        if order == "position" and len(samples) >= limit:
            break
    if order == "reward":
        samples.sort(key=lambda s: float("-inf") if s.reward is None else s.reward, reverse=True)
    elif order == "length":
        samples.sort(key=lambda s: s.tokens, reverse=True)
    return samples[:limit]


def _read(run: Run, manifest: Manifest, iteration: int, *, limit: int | None) -> list[RolloutPreview]:
    scored = run.find(StageKey.parse(manifest.key).at("scoring"))
    scores = None if scored is None else scored.shards[0]
    media = media_of(run, "train", rollouts=[manifest])
    return read_samples(run.store, manifest.shards[0], scores, iteration=iteration, media=media, limit=limit)


def media_of(run: Run, *splits: str, rollouts: Iterable[Manifest] = ()) -> Media:
    """Return the images of prompts, and the pictures that some rollouts are."""
    made = filter(None, (run.find(PROMPTS[split]) for split in splits))
    shown = [shard for prompts in made for shard in prompts.shards[1:]]
    return Media(run.store, [*shown, *(shard for each in rollouts for shard in pictures_of(each))])


def write_image(run: Run, digest: str, target: Path) -> ShownImage:
    """Write an image of a run's prompts or rollouts, as it came, to a new file; a digest may be shortened."""
    media = media_of(run, "train", "heldout")
    found = [known for known in media.digests if known.startswith(digest)]
    if not found:  # there may be very many manifests of rollouts, so they are read last
        media = media_of(run, "train", "heldout", rollouts=_kept_rollouts(run))
        found = [known for known in media.digests if known.startswith(digest)]
    if len(found) != 1:
        several = f"{len(found)} images" if found else f"none of {len(media.digests)} images"
        raise BadInput(f"image {digest!r}: expected the digest of one image of run {run.name!r}, found {several}")
    if target.exists():
        raise BadInput(f"{target}: expected a file that is not there yet, found one")
    try:
        target.write_bytes(media.encoded(found[0]))
    except OSError as error:
        raise BadInput(f"{target}: cannot be written: {error.strerror or error}") from error
    return media.shown(found[0])


def _kept_rollouts(run: Run) -> list[Manifest]:
    """Rollouts of all iterations and evaluations whose shards are still there."""
    iterations = [*iterations_among(run.folders())]
    keys = [iteration_key(number) for number in {*iterations} - without_rollouts(run, iterations)]
    keys += [key for key in run.folders() if key.startswith("eval-")]
    return [made for key in sorted(keys) for made in rollouts_under(run, key)]


def producers_of(run: Run) -> dict[str, list[str]]:
    """Name the engines of each role in the newest iteration that has rollouts; several where one was changed in it."""
    sealed = len(sealed_iterations(run))
    number = sealed + 1 if rollouts_of(run, sealed + 1) else sealed
    if find_tombstone(run, iteration_key(number)) is not None:
        return {}
    found: dict[str, set[str]] = {}
    for manifest in run.manifests(f"{iteration_key(number)}/"):
        for shard in manifest.shards:
            producer = read_metadata(run.store, shard).get("producer")
            if producer is not None:
                found.setdefault(StageKey.parse(manifest.key).stage, set()).add(producer)
    return {role: sorted(names) for role, names in found.items()}


class RunDescription(Settings):
    """A run as the store knows it."""

    name: str
    """Name."""
    created: str
    """When it was made, UTC."""
    fingerprint: str
    """Digest of the configuration that results depend on."""
    engines: dict[str, list[str]]
    """What wrote the rollouts, and each judge's verdicts, of the newest iteration; by role, with versions."""
    evaluations: list[Accuracy]
    """Held-out evaluations, in order."""
    iterations: list[IterationReport]
    """Sealed iterations, in order."""
    costs: dict[str, Cost]
    """What iterations and evaluations took together, by role."""
    policy: str | None
    """Directory of the last sealed policy, or of its adapter; none before there is one."""
    base: str | None
    """Directory of the weights to which the adapter is added; none where the policy's are its own."""
    derived: list[DerivedLine]
    """Re-scorings and re-credits of its rollouts."""
    changes: list[AcceptedChange]
    """Accepted changes of code, data and libraries, in order."""
    tags: list[str] = []
    """What it was tagged with."""
    deleted: Tombstone | None = None
    """What deleted its rollouts, samples and policies."""


def describe_run(store: str, name: str) -> RunDescription:
    """Read a run's seals and evaluations."""
    run = open_known_run(store, name)
    with detect_deletion(run):
        return described(run)


def described(run: Run) -> RunDescription:
    """Describe a run that is open."""
    policy, base = _last_policy(run)
    return RunDescription(
        name=run.name,
        created=run.record.created,
        fingerprint=run.record.fingerprint,
        engines=producers_of(run),
        evaluations=evaluations_of(run),
        iterations=reports_of(run, term=_terms(run)[0]),
        costs=run_costs(run),
        policy=policy,
        base=base,
        derived=derived_of(run),
        changes=accepted_changes(run),
        tags=sorted(tags_of(run)),
        deleted=find_tombstone(run),
    )


def read_rollouts(
    store: str, name: str, *, iteration: int | None, order: Literal["position", "reward", "length"], limit: int
) -> list[RolloutPreview]:
    """Completions of one iteration, by default the last sealed one."""
    run = open_known_run(store, name)
    with detect_deletion(run):
        if iteration is None:
            sealed = sealed_iterations(run)
            if not sealed:
                raise BadInput(f"run {name!r} has no sealed iteration yet: name the one under way with --iteration")
            iteration = report_of(sealed[-1], term=_terms(run)[0]).iteration
        return sample_rollouts(run, iteration, limit=limit, order=order)


def known_rescoring(run: Run, name: str) -> Derived:
    """A re-scoring by name, or say which one was probably meant."""
    derived, known = Derived("rescore", name), run.folders("rescore")
    if name in known and run.find(derived.terms_key) is not None:
        return derived
    raise BadInput(
        f"--scores {name!r}: expected a re-scoring of run {run.name!r}, found {', '.join(known) or 'none'}"
        f"{nearest(name, known)}"
    )


def has_run(store: str, name: str) -> bool:
    """Whether a store has a run of this name."""
    return is_key(name) and open_store(store).exists(f"{name}/{RECORD}")


def open_known_run(store: str, name: str) -> Run:
    """Open a run by name, or say which name or store was probably meant."""
    if "/" in name:
        path = Path(name)
        hint = f"; try {path.name} --store {path.parent}" if (path / "run.json").is_file() else ""
        raise BadInput(f"run {name!r}: expected a name, found a path{hint}")
    if has_run(store, name):
        return open_run(store, name)
    known = list_runs(store)
    if not known:
        raise BadInput(f"no run {name!r} in {open_store(store).uri}: no runs lie there; name another with --store")
    names = f"{', '.join(known[:10])}{', …' if len(known) > 10 else ''}"
    raise BadInput(f"no run {name!r} in {open_store(store).uri}: expected {names}{nearest(name, known)}")


@contextmanager
def detect_deletion(run: Run, *, known: Collection[str] = ()) -> Iterator[list[str]]:
    """Run the block, which reads a run, with the folders of the run's manifests.

    A run that is being deleted looks like a run that has just begun, so the block itself may not notice. Raises Damaged
    if the run's record or one of the folders, or of those that were `known` before, is gone at the end of the block.
    """

    def check() -> None:
        if not run.store.exists(RECORD) or {*known, *folders} - {*run.folders()}:
            raise Damaged(f"run {run.name!r} was deleted from {run.store.uri.rpartition('/')[0]} while it was read")

    folders = run.folders()
    try:
        yield folders
    except (RheostatError, OSError):
        check()
        raise
    check()


def _last_policy(run: Run) -> tuple[str | None, str | None]:
    """Directory of the last policy or of its adapter, and of the adapter's base."""
    committed = run.find(policy_key(run, len(sealed_iterations(run))))
    if committed is None or find_tombstone(run) is not None:
        return None, None
    policy = policy_of(committed)
    base = directory_of(run, policy.weights)
    return (base, None) if policy.adapter is None else (directory_of(run, policy.adapter), base)


def _terms(run: Run) -> tuple[str, ...]:
    return read_recorded(ScoringConfig, run.record.config["scoring"]).terms


class RescoredIteration(Settings):
    """New rewards of an iteration beside the stored ones."""

    iteration: int
    """Counted from 1."""
    completions: int
    """Completions scored again."""
    missing: int
    """Those without a new score."""
    stored_reward: float | None
    """Mean of the stored rewards."""
    reward: float | None
    """Mean of the new rewards."""
    correlation: float | None
    """Pearson's, over completions with both; none where one side is the same everywhere."""
    changed: float
    """Share of completions whose reward is another."""


def rescored_iterations(store: str, run_name: str, name: str, numbers: Iterable[int]) -> list[RescoredIteration]:
    """How the new rewards of some iterations compare."""
    run, derived = open_known_run(store, run_name), Derived("rescore", name)
    return [_rescored(number, derived.made(run, number, "seal").metrics) for number in numbers]


def _rescored(number: int, metrics: dict[str, float]) -> RescoredIteration:
    return RescoredIteration(
        iteration=number,
        completions=int(metrics["completions"]),
        missing=int(metrics["missing"]),
        stored_reward=metrics.get("stored_reward_mean"),
        reward=metrics.get("reward_mean"),
        correlation=metrics.get("correlation"),
        changed=metrics["changed_fraction"],
    )


class RecreditedIteration(Settings):
    """New advantages of an iteration beside those that it learnt from."""

    iteration: int
    """Counted from 1."""
    samples: int
    """Training samples."""
    informative_groups: int
    """Groups that teach something."""
    advantage_size: float | None
    """Mean absolute advantage of a completion token; none without tokens."""
    coinciding: int
    """Samples that the run learnt from as well."""
    correlation: float | None
    """Pearson's of their tokens' advantages; none where one side is the same everywhere."""


def recredited_iterations(store: str, run_name: str, name: str, numbers: Iterable[int]) -> list[RecreditedIteration]:
    """How the new advantages of some iterations compare."""
    run, derived = open_known_run(store, run_name), Derived("recredit", name)
    return [_recredited(number, derived.made(run, number, "seal").metrics) for number in numbers]


def _recredited(number: int, metrics: dict[str, float]) -> RecreditedIteration:
    return RecreditedIteration(
        iteration=number,
        samples=int(metrics["samples"]),
        informative_groups=int(metrics["informative_groups"]),
        advantage_size=metrics.get("advantage_size"),
        coinciding=int(metrics["coinciding"]),
        correlation=metrics.get("correlation"),
    )
