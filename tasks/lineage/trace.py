"""Origin of a run's policy: all results that led to the policy, found through the records (manifests) in which each
stage names the results that it used.

Nothing is measured again and no shard is read. Deleted data is listed as deleted.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from blake3 import blake3

from rheostat.infra.config import Settings, read_recorded
from rheostat.infra.former_names import former_name
from rheostat.infra.store.bundles import CONTENTS, BundleRef
from rheostat.infra.store.dependencies import DependencyRecord, dependency_records
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef, tombstone_key
from rheostat.infra.store.tombstones import NeededObjects, Tombstone, is_replacement, needed_objects, tombstones
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.versions import policy_of
from rheostat.tasks.run.keys import StageKey, evaluation_key, iteration_key, iteration_numbers
from rheostat.tasks.run.reverts import policy_key
from rheostat.tasks.run.states import STATES

PartState = Literal["there", "deleted", "rewritten", "missing"]
"""State of stored data: there (the data is stored), deleted (it was deleted on purpose), rewritten (prompts that
had to be forgotten were erased), or missing (the data is gone, but no record of a deletion exists)."""


class TracedPart(Settings):
    """One data file of a stage, or a folder such as the weights, and whether the data still exist."""

    name: str
    """Kind of data: `shard` for a data file with rows, or the name of a folder such as `weights`."""
    key: str
    """Key of the part in the run's store."""
    digest: str
    """BLAKE3 digest of the content."""
    state: PartState
    """Whether the data are stored, deleted, rewritten or missing."""


class TracedManifest(Settings):
    """Record that a stage wrote about its result (manifest), with the state of the data that it names."""

    key: str
    """Key of the record in the run's store, for example `it-0003/credit`."""
    digest: str
    """Digest of the stage's result."""
    created: str
    """Time of the commit, UTC."""
    parents: tuple[str, ...]
    """Keys of the results from which this result was computed. If the record of a parent is not stored, its digest
    is listed."""
    parts: tuple[TracedPart, ...]
    """Data files and folders of the result, except optimizer states."""

    @property
    def stage(self) -> StageKey:
        """Iteration and stage of the result, parsed from the key."""
        return StageKey.parse(self.key)


class TracedReward(Settings):
    """Reward term and the version of the code or model that computed it."""

    term: str
    """Name of the reward term."""
    kind: str
    """Kind of the reward, as configured."""
    version: str
    """Version of the reward: the word `model` or `code` and the digest of the model or code, or the version of Rheostat
    for built-in rewards."""


class TracedRun(Settings):
    """Origin of a run's policy: settings, rewards, code, data, and all results that led to the policy."""

    name: str
    """Name of the run."""
    fingerprint: str
    """Fingerprint of the run's configuration."""
    created: str
    """Time of creation, UTC."""
    policy: str
    """Digest of the policy's weights. Empty if there is no policy yet."""
    iterations: tuple[int, ...]
    """Numbers of the completed iterations."""
    rewards: tuple[TracedReward, ...]
    """Reward terms that the run was trained with, each with the version of the code or model that computed it."""
    dependencies: tuple[DependencyRecord, ...]
    """Code, data files and libraries of the run, with each accepted change."""
    manifests: tuple[TracedManifest, ...]
    """Results that led to the policy, and evaluations of the run's policies with all that they depend on, sorted by
    key."""
    deleted: tuple[Tombstone, ...]
    """Records of everything that was deleted on purpose (tombstones), with reason and time."""
    forked_from: str = ""
    """Run and iteration at which the run begins if it is a fork, such as `demo@12`. Otherwise empty."""

    def of(self, number: int) -> list[TracedManifest]:
        """Return the results of one iteration."""
        return [each for each in self.manifests if each.key.startswith(f"{iteration_key(number)}/")]

    def find(self, key: str) -> TracedManifest | None:
        """Return the result with this key, for example `it-0003/update`, or None if the policy was not made from it."""
        return next((each for each in self.manifests if each.key == key), None)


def trace_run(run: Run, *, iteration: int | None = None) -> TracedRun:
    """Trace the origin of the policy after an iteration, by default the last complete one. Reads only records, no
    data."""
    manifests = run.manifests()
    last = max((number for number in iteration_numbers(run.folders()) if run.has(_seal_key(number))), default=0)
    last = last if iteration is None else iteration
    results = [_seal_key(number) for number in range(1, last + 1)] + [policy_key(run, last)]
    results += [StageKey.of(evaluation_key(number), "summary") for number in range(last + 1)]
    traced = _collect_ancestors(manifests, [each for each in manifests if each.key in results])
    policy, dependencies = run.find(policy_key(run, last)), tuple(dependency_records(run))
    return TracedRun(
        name=run.name,
        fingerprint=run.record.fingerprint,
        created=run.record.created,
        policy="" if policy is None else policy_of(policy).digest,
        iterations=tuple(number for number in range(1, last + 1) if run.has(_seal_key(number))),
        rewards=tuple(traced_rewards(run, dependencies)),
        dependencies=dependencies,
        manifests=tuple(_describe_manifests(run, traced, manifests)),
        deleted=tuple(tombstones(run)),
        forked_from="" if run.fork is None else run.fork.point,
    )


def _seal_key(number: int) -> StageKey:
    return StageKey.of(iteration_key(number), "seal")


def _collect_ancestors(manifests: Iterable[Manifest], results: list[Manifest]) -> list[Manifest]:
    """Return the results together with every result that they were computed from, sorted by key."""
    by_digest, collected, pending = {each.digest: each for each in manifests}, dict[str, Manifest](), [*results]
    while pending:
        manifest = pending.pop()
        if manifest.key not in collected:
            collected[manifest.key] = manifest
            pending += [by_digest[parent] for parent in manifest.parents if parent in by_digest]
    return [collected[key] for key in sorted(collected)]


def _describe_manifests(run: Run, traced: list[Manifest], manifests: list[Manifest]) -> Iterator[TracedManifest]:
    names = {each.digest: each.key for each in manifests}
    needed_parts, replaced_keys = needed_objects(manifests), {each.key for each in manifests if is_replacement(each)}
    parts = {each.key: _parts_of(each) for each in traced}
    keys = [_object_key(ref) for named_parts in parts.values() for _, ref in named_parts]
    exist = dict(zip(keys, run.store.exist(keys), strict=True))
    for each in traced:
        yield TracedManifest(
            key=each.key,
            digest=each.digest,
            created=each.provenance.created,
            parents=tuple(names.get(parent, parent) for parent in each.parents),
            parts=tuple(
                TracedPart(
                    name=name,
                    key=ref.key,
                    digest=ref.digest,
                    state=_find_state(ref, needed_parts, replaced_keys, exist),
                )
                for name, ref in parts[each.key]
            ),
        )


def _parts_of(manifest: Manifest) -> list[tuple[str, ShardRef | BundleRef]]:
    bundles = [(name, bundle) for name, bundle in manifest.bundles.items() if name not in STATES]
    return [*(("shard", shard) for shard in manifest.shards), *bundles]


def _object_key(ref: ShardRef | BundleRef) -> str:
    return ref.key if isinstance(ref, ShardRef) else f"{ref.key}/{CONTENTS}"


def _find_state(
    ref: ShardRef | BundleRef, needed_parts: NeededObjects, replaced_keys: set[str], exist: dict[str, bool]
) -> PartState:
    if exist[_object_key(ref)]:
        return "there"
    if ref in needed_parts.shards or ref in needed_parts.bundles:
        return "missing"
    return "rewritten" if tombstone_key(ref.digest) in replaced_keys else "deleted"


def traced_rewards(run: Run, dependencies: Sequence[DependencyRecord]) -> Iterator[TracedReward]:
    """Yield each reward term with the version of its code or model, based on the newest recorded dependencies of
    the run."""
    scoring = read_recorded(ScoringConfig, run.record.config["scoring"])
    last = dependencies[-1].dependencies if dependencies else None
    user_rules = {term: rule for term, rule in zip(scoring.rule_terms, scoring.rules, strict=True) if rule.brings_code}
    for term, reward in zip(scoring.terms, scoring.rewards, strict=True):
        model = run.find(StageKey.reward_model(term)) if term in scoring.hosted_rewards else None
        if model is not None:
            version = f"model {policy_of(model).digest}"
        elif term in user_rules and last is not None:
            modules = last.code.get(f"reward {former_name(user_rules[term].function.target)}", {})
            version = f"code {blake3(repr(sorted(modules.items())).encode()).hexdigest()}"
        else:
            version = f"rheostat {last.libraries.get('rheostat', 'unknown') if last else 'unknown'}"
        yield TracedReward(term=term, kind=reward.kind, version=version)
