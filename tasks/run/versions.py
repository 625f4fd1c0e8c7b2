"""Policy versions as manifests name them. Reading commands need this, and no Prefect."""

from infra.store.bundles import CONTENTS, BundleRef
from infra.store.manifests import Manifest
from infra.store.runs import Run
from models.records.versions import ModelVersion


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
    """Where a bundle's files lie."""
    return str(run.store.local(f"{bundle.key}/{CONTENTS}").parent)
