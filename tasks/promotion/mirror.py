"""MLflow's model registry as a mirror: promoted policies are its versions, whose alias `champion` follows ours.

Ours decides, and is never read from there. A mirror is written from the records, so that whoever writes next adds what
it lacks: one that was down catches up. Needs no Prefect.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from infra.errors import BadInput, EndpointDown, RheostatError
from infra.processes.watch import aside
from infra.store.bundles import BundleRef, has_bundle
from infra.store.registry import Registry, RegistryRecord, champion_of

if TYPE_CHECKING:
    from mlflow import MlflowClient

PACKAGE: Final = "mlflow-skinny>=3.17,<4"
ADDRESS: Final = "MLFLOW_REGISTRY_URI"
"""MLflow's own variable for the address of its registry; where it is set there is a mirror."""
ALIAS: Final = "champion"
FILES: Final = "rheostat.files"
"""Tag of a version: the digest of its files."""
MIRROR_SECONDS: Final = 120.0
"""How long a mirror may take; a database that is down is tried for an hour otherwise."""
CLIENT: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # its own seven take minutes where a server is down
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
"""What MLflow reads from the environment when it is imported; what the user has set stays."""


def mirror_address() -> str | None:
    """Where the mirror is; none where there is none."""
    return os.environ.get(ADDRESS) or None


def catch_up(registry: Registry, address: str) -> str | None:
    """Bring a mirror up to date; say what hindered that, in a line."""
    try:
        mirror(registry, address)
    except (RheostatError, OSError) as error:  # the record stands
        return str(error)
    return None


def mirror(registry: Registry, address: str) -> str:
    """Have MLflow's registry say what ours says; return which of its versions is the champion, in words.

    Raises BadInput where its client is not installed, EndpointDown where it does not take all that in time.
    """
    try:
        client = _client(address)
        return aside(lambda: _mirror(client, registry, address)).result(MIRROR_SECONDS)
    except TimeoutError:
        raise EndpointDown(f"MLflow's registry: no answer within {MIRROR_SECONDS:g} s") from None
    except RheostatError:
        raise
    except Exception as error:  # MLflow's own, its database's and its network's; the address may have a password
        line = str(error).strip().partition("\n")[0]
        raise EndpointDown(f"MLflow's registry: {type(error).__name__}: {line}") from error


def _mirror(client: "MlflowClient", registry: Registry, address: str) -> str:
    done: RegistryRecord | None = None
    version = ""
    while (champion := champion_of(records := registry.records())) is not None and champion != done:
        versions = _known(client, registry.name)
        for record in records:
            bundle = record.bundle
            is_new = record.kind == "promote" and bundle is not None and bundle.digest not in versions
            if is_new and bundle is not None and has_bundle(registry.store, bundle):  # of old ones the files are gone
                versions[bundle.digest] = _added(client, registry, record, bundle, address)
        assert champion.bundle is not None, "who is champion has files"
        version = versions[champion.bundle.digest]
        client.set_registered_model_alias(registry.name, ALIAS, version)
        client.set_registered_model_tag(registry.name, "rheostat.record", str(champion.number))
        done = champion  # another may have come, whose alias this one has just taken away
    return f"version {version} is champion, by record {done.number}" if done else "there is no champion yet"


def _client(address: str) -> "MlflowClient":
    for name, value in CLIENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise BadInput(f"{ADDRESS}: expected the package mlflow-skinny, found none; pip install '{PACKAGE}'") from error
    for name in ("mlflow", "urllib3.connectionpool"):  # they tell of tables that are made, and of each try
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient(tracking_uri=address, registry_uri=address)


def _known(client: "MlflowClient", name: str) -> dict[str, str]:
    """Versions by the digest of their files, in a registered model that is made where there is none."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = client.search_model_versions(f"name='{name}'")
    return {version.tags[FILES]: str(version.version) for version in found if FILES in version.tags}


def _added(client: "MlflowClient", registry: Registry, record: RegistryRecord, bundle: BundleRef, address: str) -> str:
    place = registry.locate(record)
    if "://" not in place:  # MLflow's server takes no path of a machine that may not be its own as a version's source
        path = Path(place).absolute()
        place = f"rheostat:{path}" if address.startswith("http") else path.as_uri()
    facts = {"record": record.number, "policy": record.policy, "run": record.run, "who": record.who}
    tags = {FILES: bundle.digest, **{f"rheostat.{name}": str(value) for name, value in facts.items()}}
    made = client.create_model_version(registry.name, source=place, tags=tags, description=record.reason)
    return str(made.version)
