"""Data about runs and their rescorings for commands that only read. Needs neither Prefect's API nor a worker."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.costs import Cost
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Damaged, RheostatError
from rheostat.infra.store.dependencies import AcceptedChange, accepted_changes
from rheostat.infra.store.garbage import tags_of
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.run_record import RECORD
from rheostat.infra.store.runs import Run, list_runs, open_run
from rheostat.infra.store.shards import read_metadata
from rheostat.infra.store.storage import open_store
from rheostat.infra.store.tombstones import Tombstone, find_tombstone
from rheostat.infra.validation_errors import nearest
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.media import Media, ShownImage
from rheostat.models.records.versions import directory_of, policy_of
from rheostat.models.rollouts.preview import RolloutPreview, read_samples
from rheostat.tasks.run.batch import (
    check_rollouts_kept,
    iterations_without_rollouts,
    picture_shards_of,
    rollouts_of,
    rollouts_of_batch,
)
from rheostat.tasks.run.keys import PROMPTS, StageKey, iteration_key, iteration_numbers
from rheostat.tasks.run.rescorings import DerivedResult, DerivedSummary, list_derived_results
from rheostat.tasks.run.reverts import policy_key
from rheostat.tasks.views.metrics import (
    Accuracy,
    IterationReport,
    evaluations_of,
    read_report,
    reports_of,
    run_costs,
    sealed_iterations,
)
from rheostat.tasks.views.run_list import has_run


def sample_rollouts(
    run: Run, iteration: int, *, limit: int, order: Literal["reward", "length", "position"] = "position"
) -> list[RolloutPreview]:
    """Return up to `limit` completions of one iteration in the requested order.

    In the order of position, only the shards and rows that `limit` needs are read. Raises BadInput if the iteration has
    no rollouts or they were deleted.
    """
    check_rollouts_kept(run, [iteration])
    rollouts = rollouts_of(run, iteration)
    if not rollouts:
        started = [iteration_key(number) for number in iteration_numbers(run.folders()) if rollouts_of(run, number)]
        existing = f"{started[0]} to {started[-1]}" if started else "none yet"
        raise BadInput(
            f"Run {run.name!r} has no rollouts of iteration {iteration}. Iterations with rollouts: {existing}"
        )
    samples: list[RolloutPreview] = []
    for manifest in rollouts:
        samples += _read_previews(run, manifest, iteration, limit=limit - len(samples) if order == "position" else None)
        if order == "position" and len(samples) >= limit:
            break
    if order == "reward":
        samples.sort(key=lambda s: float("-inf") if s.reward is None else s.reward, reverse=True)
    elif order == "length":
        samples.sort(key=lambda s: s.tokens, reverse=True)
    return samples[:limit]


def _read_previews(run: Run, manifest: Manifest, iteration: int, *, limit: int | None) -> list[RolloutPreview]:
    scored = run.find(StageKey.parse(manifest.key).with_stage("scoring"))
    scores = None if scored is None else scored.shards[0]
    media = media_of(run, "train", rollouts=[manifest])
    return read_samples(run.store, manifest.shards[0], scores, iteration=iteration, media=media, limit=limit)


def media_of(run: Run, *splits: str, rollouts: Iterable[Manifest] = ()) -> Media:
    """Return access to the images of a run: images in the prompts of the given splits, and images generated in
    `rollouts`."""
    manifests = filter(None, (run.find(PROMPTS[split]) for split in splits))
    shards = [shard for prompts in manifests for shard in prompts.shards[1:]]
    return Media(run.store, [*shards, *(shard for each in rollouts for shard in picture_shards_of(each))])


def write_image(run: Run, digest: str, target: Path) -> ShownImage:
    """Write one image of a run's prompts or rollouts to a new file, unchanged. `rheostat rollouts` prints the digests.

    `digest` may be a prefix. Raises BadInput if it does not match exactly one image, or if the file exists or cannot be
    written.
    """
    media = media_of(run, "train", "heldout")
    matches = [known for known in media.digests if known.startswith(digest)]
    if not matches:  # a run may have very many rollout manifests, so they are read only if the image is not in a prompt
        media = media_of(run, "train", "heldout", rollouts=_stored_rollouts(run))
        matches = [known for known in media.digests if known.startswith(digest)]
    if len(matches) != 1:
        matched = format_count(len(matches), "image") if matches else f"none of {len(media.digests)} images"
        raise BadInput(
            f"{digest!r} must be the beginning of the digest of exactly one image of run {run.name!r}, but it matches "
            f"{matched}. `rheostat rollouts` prints the digests."
        )
    if target.exists():
        raise BadInput(f"{target} already exists. Choose another file, or delete this one.")
    try:
        target.write_bytes(media.encoded(matches[0]))
    except OSError as error:
        raise BadInput(f"{target} cannot be written: {error.strerror or error}. Choose another file.") from error
    return media.shown(matches[0])


def _stored_rollouts(run: Run) -> list[Manifest]:
    """Return the records of all rollouts of a run whose shards still exist, including rollouts of evaluations."""
    iterations = [*iteration_numbers(run.folders())]
    keys = [iteration_key(number) for number in {*iterations} - iterations_without_rollouts(run, iterations)]
    keys += [key for key in run.folders() if key.startswith("eval-")]
    return [manifest for key in sorted(keys) for manifest in rollouts_of_batch(run, key)]


def engines_by_role(run: Run) -> dict[str, list[str]]:
    """Return the engines (with versions) that workers of each role used in the newest iteration with rollouts. A role
    has several engines if its engine was changed during the iteration."""
    sealed = len(sealed_iterations(run))
    number = sealed + 1 if rollouts_of(run, sealed + 1) else sealed
    if find_tombstone(run, iteration_key(number)) is not None:
        return {}
    producers: dict[str, set[str]] = {}
    for manifest in run.manifests(f"{iteration_key(number)}/"):
        for shard in manifest.shards:
            producer = read_metadata(run.store, shard).get("producer")
            if producer is not None:
                producers.setdefault(StageKey.parse(manifest.key).stage, set()).add(producer)
    return {role: sorted(names) for role, names in producers.items()}


class RunDescription(Settings):
    """Everything that `rheostat show` reports about a run."""

    name: str
    """Name of the run."""
    created: str
    """Time of creation, UTC."""
    fingerprint: str
    """Digest of the configuration that results depend on."""
    engines: dict[str, list[str]]
    """Engines, with versions, that generated the rollouts and judges' verdicts of the newest iteration, by role."""
    evaluations: list[Accuracy]
    """Held-out evaluations, in order."""
    iterations: list[IterationReport]
    """Statistics of the completed iterations, in order."""
    costs: dict[str, Cost]
    """Total costs of iterations and evaluations, by role."""
    policy: str | None
    """Directory of the last policy or of its adapter, or None if there is no policy yet."""
    base: str | None
    """Directory of the base weights to which the adapter is added, or None if the policy has no adapter."""
    derived: list[DerivedSummary]
    """Rescorings (new scores) and recredits (new advantages) of the run's rollouts."""
    changes: list[AcceptedChange]
    """Accepted changes of code, data and libraries, in order."""
    tags: list[str] = []
    """Tags of the run."""
    forked_from: str = ""
    """Run and iteration at which the run begins if it is a fork, such as `demo@12`. Otherwise empty."""
    deleted: Tombstone | None = None
    """Record of the deletion (tombstone) if the run's rollouts, samples and policies were deleted, otherwise None."""


def describe_run(store: str, name: str) -> RunDescription:
    """Read everything that `rheostat show` reports about a run. Raises BadInput if the store has no such run."""
    run = open_known_run(store, name)
    with detect_deletion(run):
        return describe_open_run(run)


def describe_open_run(run: Run) -> RunDescription:
    """Read everything that `rheostat show` reports about a run that is already open."""
    policy, base = _last_policy(run)
    return RunDescription(
        name=run.name,
        created=run.record.created,
        fingerprint=run.record.fingerprint,
        engines=engines_by_role(run),
        evaluations=evaluations_of(run),
        iterations=reports_of(run, term=_terms_of(run)[0]),
        costs=run_costs(run),
        policy=policy,
        base=base,
        derived=list_derived_results(run),
        changes=accepted_changes(run),
        tags=sorted(tags_of(run)),
        forked_from="" if run.fork is None else run.fork.point,
        deleted=find_tombstone(run),
    )


def read_rollouts(
    store: str, name: str, *, iteration: int | None, order: Literal["position", "reward", "length"], limit: int
) -> list[RolloutPreview]:
    """Return completions of one iteration, by default the last completed one.

    Raises BadInput if the run or the iteration does not exist, or the rollouts were deleted.
    """
    run = open_known_run(store, name)
    with detect_deletion(run):
        if iteration is None:
            sealed = sealed_iterations(run)
            if not sealed:
                raise BadInput(
                    f"Run {name!r} has no completed iteration yet. Choose one that is in progress with --iteration."
                )
            iteration = read_report(sealed[-1], term=_terms_of(run)[0]).iteration
        return sample_rollouts(run, iteration, limit=limit, order=order)


def known_rescoring(run: Run, name: str) -> DerivedResult:
    """Find a rescoring of a run by its name. Raises BadInput with the most similar name if there is none."""
    derived, known = DerivedResult("rescore", name), run.folders("rescore")
    if name in known and run.find(derived.terms_key) is not None:
        return derived
    raise BadInput(
        f"--scores {name!r} is not the name of a rescoring of run {run.name!r}. Existing rescorings: "
        f"{', '.join(known) or 'none'}{nearest(name, known)}"
    )


def open_known_run(store: str, name: str) -> Run:
    """Open a run by name. Raises BadInput if the store has no such run, with the most similar name or the store that
    was probably meant."""
    if "/" in name:
        path = Path(name)
        hint = f" Try {path.name} --store {path.parent}" if (path / "run.json").is_file() else ""
        raise BadInput(f"Write the name of a run instead of a path, found {name!r}.{hint}")
    if has_run(store, name):
        return open_run(store, name)
    known = list_runs(store)
    if not known:
        raise BadInput(
            f"There is no run {name!r} in {open_store(store).uri}, because this store has no runs. Set --store to the "
            "store of the run."
        )
    names = f"{', '.join(known[:10])}{', …' if len(known) > 10 else ''}"
    raise BadInput(f"There is no run {name!r} in {open_store(store).uri}. Existing runs: {names}{nearest(name, known)}")


@contextmanager
def detect_deletion(run: Run, *, known: Collection[str] = ()) -> Iterator[list[str]]:
    """Run a block that reads a run, and raise Damaged if the run is deleted during the block. Yields the folders of the
    run's records.

    The block itself may not notice the deletion, because a partly deleted run looks like a run that has just begun. So
    at the end of the block the run's record, the yielded folders and the folders in `known` must still exist.
    """

    def check() -> None:
        if not run.store.exists(RECORD) or {*known, *folders} - {*run.folders()}:
            raise Damaged(
                f"run {run.name!r} was deleted from the store {run.store.uri.rpartition('/')[0]} while it was read. "
                "Choose another run"
            )

    folders = run.folders()
    try:
        yield folders
    except (RheostatError, OSError):
        check()
        raise
    check()


def _last_policy(run: Run) -> tuple[str | None, str | None]:
    """Return the directory of the last policy or of its adapter, and for an adapter the directory of the base model.
    Both are None if there is no policy."""
    committed = run.find(policy_key(run, len(sealed_iterations(run))))
    if committed is None or find_tombstone(run) is not None:
        return None, None
    policy = policy_of(committed)
    base = directory_of(run, policy.weights)
    return (base, None) if policy.adapter is None else (directory_of(run, policy.adapter), base)


def _terms_of(run: Run) -> tuple[str, ...]:
    return read_recorded(ScoringConfig, run.record.config["scoring"]).terms


class RescoredIteration(Settings):
    """Rewards of an iteration after rescoring, compared with the stored rewards."""

    iteration: int
    """Number of the iteration, counted from 1."""
    completions: int
    """Number of completions that were scored again."""
    missing: int
    """Number of completions without a new score."""
    stored_reward: float | None
    """Mean of the stored rewards."""
    reward: float | None
    """Mean of the new rewards."""
    correlation: float | None
    """Pearson correlation between new and stored rewards over completions that have both. None if one of the two is
    constant."""
    changed: float
    """Fraction of completions whose reward changed."""


def rescored_iterations(store: str, run_name: str, name: str, numbers: Iterable[int]) -> list[RescoredIteration]:
    """Return how the rewards of some iterations changed in a rescoring."""
    run, derived = open_known_run(store, run_name), DerivedResult("rescore", name)
    return [_compare_rewards(number, derived.stage_manifest(run, number, "seal").metrics) for number in numbers]


def _compare_rewards(number: int, metrics: dict[str, float]) -> RescoredIteration:
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
    """Advantages of an iteration after a recredit, compared with the advantages that the update trained on."""

    iteration: int
    """Number of the iteration, counted from 1."""
    samples: int
    """Number of training samples."""
    informative_groups: int
    """Number of groups with different rewards, which are the groups that train the policy."""
    advantage_size: float | None
    """Mean absolute advantage of a completion token, or None if there are no tokens."""
    coinciding: int
    """Number of samples that are also among the stored samples of the iteration."""
    correlation: float | None
    """Pearson correlation between new and stored advantages over the tokens of the coinciding samples. None if one of
    the two is constant."""


def recredited_iterations(store: str, run_name: str, name: str, numbers: Iterable[int]) -> list[RecreditedIteration]:
    """Return how the advantages of some iterations changed in a recredit."""
    run, derived = open_known_run(store, run_name), DerivedResult("recredit", name)
    return [_compare_advantages(number, derived.stage_manifest(run, number, "seal").metrics) for number in numbers]


def _compare_advantages(number: int, metrics: dict[str, float]) -> RecreditedIteration:
    return RecreditedIteration(
        iteration=number,
        samples=int(metrics["samples"]),
        informative_groups=int(metrics["informative_groups"]),
        advantage_size=metrics.get("advantage_size"),
        coinciding=int(metrics["coinciding"]),
        correlation=metrics.get("correlation"),
    )
