"""Model versions and the bundles under which manifests record them. Does not import Prefect, for commands that only
read."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3
from pydantic import JsonValue

from rheostat.infra.store.bundles import CONTENTS, BundleRef
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import ShardRef

AVERAGE: Final = "reference"
"""Name under which the record of an update lists the moving average of the policies, the next iteration's reference."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """Version of a trained model, after `version` updates: immutable weights and, except for the initial version, the
    optimizer state."""

    version: int
    weights: BundleRef
    """Bundle with the weights of the model. If there is an adapter, the bundle contains the weights of the base
    model."""
    state: BundleRef | None = None
    adapter: BundleRef | None = None
    """Bundle with the LoRA adapter that is added to the weights, or None if the model has no adapter."""

    @property
    def digest(self) -> str:
        """Digest that identifies the model: the digest of its weights or, if there is an adapter, a digest of both."""
        if self.adapter is None:
            return self.weights.digest
        return blake3(f"{self.weights.digest}+{self.adapter.digest}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a work unit (a request to a worker): references to the stored shards and models, and numbers.

    The `metrics` depend only on the inputs and are part of the manifest's digest. The `timings`, in seconds, are not.
    """

    shards: tuple[ShardRef, ...] = ()
    model: ModelVersion | None = None
    """Policy, critic, judge, reward model or teacher that the work unit created or trained, or None."""
    critic: ModelVersion | None = None
    average: BundleRef | None = None
    """Bundle with the moving average of the policies up to `model`, or None if the reference is no moving average."""
    metrics: dict[str, float] | None = None
    detail: dict[str, JsonValue] | None = None
    """Other facts about the result that depend only on the inputs, such as names and row numbers. They never contain
    texts or tokens."""
    timings: dict[str, float] | None = None


class StageTimer:
    """Timer that measures the seconds of consecutive phases by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def end(self, name: str) -> None:
        """Add the seconds since the previous call of `end` to the phase `name`. The same phase may be ended several
        times."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now


def order_statistics(lengths: Sequence[int], max_count: int = 64) -> list[JsonValue]:
    """Summarize lengths by at most `max_count` of them, evenly spaced in ascending order from the minimum to the
    maximum.

    Workers report this summary of their sequence lengths, from which the scheduler forecasts durations.

    >>> order_statistics([9, 1, 5, 3, 7], max_count=3)
    [1, 5, 9]
    """
    ordered = sorted(lengths)
    if len(ordered) <= max_count:
        return [*ordered]
    return [ordered[round(index * (len(ordered) - 1) / (max_count - 1))] for index in range(max_count)]


def policy_of(manifest: Manifest) -> ModelVersion:
    """Return the policy version that is stored in a manifest."""
    version, bundles = manifest.detail["version"], manifest.bundles
    assert isinstance(version, int)
    return ModelVersion(
        version=version, weights=bundles["weights"], state=bundles.get("state"), adapter=bundles.get("adapter")
    )


def critic_of(manifest: Manifest) -> ModelVersion:
    """Return the critic version that is stored in a manifest, together with a policy or alone."""
    version, bundles = manifest.detail["version"], manifest.bundles
    assert isinstance(version, int)
    return ModelVersion(
        version=version,
        weights=bundles["critic"],
        state=bundles.get("critic_state"),
        adapter=bundles.get("critic_adapter"),
    )


def bundles_of(policy: ModelVersion) -> dict[str, BundleRef]:
    """Return the bundles of a policy (weights, adapter, optimizer state) by their names in manifests."""
    bundles = {"weights": policy.weights, "state": policy.state, "adapter": policy.adapter}
    return {name: bundle for name, bundle in bundles.items() if bundle is not None}


def critic_bundles_of(critic: ModelVersion) -> dict[str, BundleRef]:
    """Return the bundles of a critic (weights, adapter, optimizer state) by their names in manifests."""
    bundles = {"critic": critic.weights, "critic_state": critic.state, "critic_adapter": critic.adapter}
    return {name: bundle for name, bundle in bundles.items() if bundle is not None}


def directory_of(run: Run, bundle: BundleRef) -> str:
    """Return the location of a bundle's files in a run's store: a local path or a URL."""
    return run.store.locate(f"{bundle.key}/{CONTENTS}").rpartition("/")[0]
