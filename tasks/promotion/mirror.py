"""Mirror of a registry in MLflow's model registry. Each promoted policy becomes a model version there, and the alias
`champion` points to the current champion.

Rheostat's registry is authoritative and never reads from MLflow. Each update writes everything that MLflow lacks, so
updates missed during an outage are made up later. Needs no Prefect.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rheostat.infra.errors import BadInput, EndpointDown, RheostatError
from rheostat.infra.processes.watch import start_apart
from rheostat.infra.store.bundles import BundleRef, has_bundle
from rheostat.infra.store.registry import Registry, RegistryRecord, champion_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

PACKAGE: Final = "mlflow-skinny>=3.17,<4"
ADDRESS_VARIABLE: Final = "MLFLOW_REGISTRY_URI"
"""Environment variable of MLflow with the address of its registry. The mirror is enabled if this variable is set."""
ALIAS: Final = "champion"
FILES: Final = "rheostat.files"
"""Tag of a version with the digest of its files."""
MIRROR_SECONDS: Final = 120.0
"""Maximum duration of a mirror update in seconds. Without a limit, MLflow retries an unreachable database for an
hour."""
CLIENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # MLflow's default of seven retries takes minutes if a server is down
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""Environment variables that MLflow reads on import. Values set by the user are kept."""


def mirror_address() -> str | None:
    """Return the address of the mirror, or None if no mirror is configured."""
    return os.environ.get(ADDRESS_VARIABLE) or None


def try_sync_to_mlflow(registry: Registry, address: str) -> str | None:
    """Update MLflow's registry from ours. Return None on success, or the reason for the failure in one line."""
    try:
        sync_to_mlflow(registry, address)
    except (RheostatError, OSError) as error:  # the record in our registry is valid anyway
        return str(error)
    return None


def sync_to_mlflow(registry: Registry, address: str) -> str:
    """Update MLflow's registry from ours. Return a sentence that names the MLflow version of the champion.

    Raises BadInput if the MLflow client is not installed, and EndpointDown if MLflow fails or does not respond within
    `MIRROR_SECONDS`.
    """
    try:
        client = _open_client(address)
        return start_apart(lambda: _sync_versions(client, registry, address)).result(MIRROR_SECONDS)
    except TimeoutError:
        raise EndpointDown(
            f"MLflow's registry did not respond within {MIRROR_SECONDS:g} s. Check its address and its server, then "
            "sync again with `rheostat mirror`."
        ) from None
    except RheostatError:
        raise
    except Exception as error:  # errors of MLflow, its database or its network; the address may contain a password
        line = str(error).strip().partition("\n")[0]
        raise EndpointDown(
            f"MLflow's registry could not be synced ({type(error).__name__}: {line}). Check its address and its "
            "server, then sync again with `rheostat mirror`."
        ) from error


def _sync_versions(client: "MlflowClient", registry: Registry, address: str) -> str:
    done: RegistryRecord | None = None
    version = ""
    while (champion := champion_of(records := registry.records())) is not None and champion != done:
        versions = _known_versions(client, registry.name)
        for record in records:
            bundle = record.bundle
            is_new = record.kind == "promote" and bundle is not None and bundle.digest not in versions
            # the files of old policies are deleted
            if is_new and bundle is not None and has_bundle(registry.store, bundle):
                versions[bundle.digest] = _add_version(client, registry, record, bundle, address)
        assert champion.bundle is not None, "who is champion has files"
        version = versions[champion.bundle.digest]
        client.set_registered_model_alias(registry.name, ALIAS, version)
        client.set_registered_model_tag(registry.name, "rheostat.record", str(champion.number))
        done = champion  # a newer champion may exist, whose alias this update has just overwritten
    return f"version {version} is champion (record {done.number})" if done else "there is no champion yet"


def _open_client(address: str) -> "MlflowClient":
    for name, value in CLIENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise BadInput(
            f"Syncing to MLflow needs the package mlflow-skinny. Install it with: pip install '{PACKAGE}'"
        ) from error
    for name in ("mlflow", "urllib3.connectionpool"):  # both log every created table or retry
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=address, registry_uri=address)


def _known_versions(client: "MlflowClient", name: str) -> dict[str, str]:
    """Return the model versions that MLflow already has, by digest of their files. Creates the registered model if it
    does not exist."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name='{name}'")
    return {version.tags[FILES]: str(version.version) for version in versions if FILES in version.tags}


def _add_version(
    client: "MlflowClient", registry: Registry, record: RegistryRecord, bundle: BundleRef, address: str
) -> str:
    source = registry.locate(record)
    if "://" not in source:  # as the source of a version, MLflow's server rejects a local path
        path = Path(source).absolute()
        source = f"rheostat:{path}" if address.startswith("http") else path.as_uri()
    facts = {"record": record.number, "policy": record.policy, "run": record.run, "who": record.who}
    tags = {FILES: bundle.digest, **{f"rheostat.{name}": str(value) for name, value in facts.items()}}
    version = client.create_model_version(registry.name, source=source, tags=tags, description=record.reason)
    return str(version.version)
