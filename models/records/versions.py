"""Versions of models: their records, and as manifests name them. Reading commands need this, and no Prefect."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3
from pydantic import JsonValue

from infra.store.bundles import CONTENTS, BundleRef
from infra.store.manifests import Manifest
from infra.store.runs import Run
from infra.store.shards import ShardRef


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """A model after `version` updates: immutable weights, and the optimizer state beside them (none at the start)."""

    version: int
    weights: BundleRef
    """With an adapter, those of its base."""
    state: BundleRef | None = None
    adapter: BundleRef | None = None
    """Low-rank deltas that are added to the weights; none leaves them as they are."""

    @property
    def digest(self) -> str:
        """What proves which model is served: of weights and adapter together."""
        if self.adapter is None:
            return self.weights.digest
        return blake3(f"{self.weights.digest}+{self.adapter.digest}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker hands back: references and numbers.

    `metrics` are functions of the inputs alone and enter the manifest's digest; `timings` (seconds) do not.
    """

    shards: tuple[ShardRef, ...] = ()
    model: ModelVersion | None = None
    """The policy, judge, reward model or teacher that was made or trained."""
    critic: ModelVersion | None = None
    metrics: dict[str, float] | None = None
    detail: dict[str, JsonValue] | None = None
    """Other facts that follow from the inputs alone: names and row numbers, never payloads."""
    timings: dict[str, float] | None = None


class StageTimer:
    """Seconds by name, each since the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """Say what the time since the last lap went to; a name may come again."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def order_statistics(lengths: Sequence[int], most: int = 64) -> list[JsonValue]:
    """At most `most` of the lengths, evenly spaced in ascending order from the least to the greatest.

    They stand in an outcome's detail for all sequences of its unit: placement forecasts from them.

    >>> order_statistics([9, 1, 5, 3, 7], most=3)
    [1, 5, 9]
    """
    ascending = sorted(lengths)
    if len(ascending) <= most:
        return [*ascending]
    return [ascending[round(index * (len(ascending) - 1) / (most - 1))] for index in range(most)]


def policy_of(manifest: Manifest) -> ModelVersion:
    """The policy version that a manifest committed."""
    version, bundles = manifest.detail["version"], manifest.bundles
    assert isinstance(version, int)
    return ModelVersion(
        version=version, weights=bundles["weights"], state=bundles.get("state"), adapter=bundles.get("adapter")
    )


def critic_of(manifest: Manifest) -> ModelVersion:
    """The version of the critic that a manifest committed, beside a policy or alone."""
    version, bundles = manifest.detail["version"], manifest.bundles
    assert isinstance(version, int)
    return ModelVersion(
        version=version,
        weights=bundles["critic"],
        state=bundles.get("critic_state"),
        adapter=bundles.get("critic_adapter"),
    )


def bundles_of(policy: ModelVersion) -> dict[str, BundleRef]:
    """The bundles of a policy version by the names that manifests give them."""
    named = {"weights": policy.weights, "state": policy.state, "adapter": policy.adapter}
    return {name: bundle for name, bundle in named.items() if bundle is not None}


def critic_bundles_of(critic: ModelVersion) -> dict[str, BundleRef]:
    """The same of a critic."""
    named = {"critic": critic.weights, "critic_state": critic.state, "critic_adapter": critic.adapter}
    return {name: bundle for name, bundle in named.items() if bundle is not None}


def directory_of(run: Run, bundle: BundleRef) -> str:
    """Where a bundle's files lie: a path, or an address."""
    return run.store.locate(f"{bundle.key}/{CONTENTS}").rpartition("/")[0]
