"""Commands that serve the champion of a registry, or provide its files, and follow changes of the champion."""

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rheostat.flows.cli.engines import EngineOverrides, KeyVariable, engine_config
from rheostat.flows.cli.options import DEFAULT_STORE, Store, log_progress
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import parse_port, write

if TYPE_CHECKING:
    from rheostat.infra.store.registry import RegistryRecord

Registered = Annotated[str, Parameter(name="NAME", help="name of the registry")]
Host = Annotated[str, Parameter(help="network interface to listen on; 0.0.0.0 for all")]
Port = Annotated[int, Parameter(converter=parse_port, help="port to listen on")]
Every = Annotated[float, Parameter(metavar="SECONDS", help="interval between checks for a new champion")]
PolicyAlias = Annotated[
    Literal["champion", "canary"],
    Parameter(help="policy to use; canary is the newest proposal that waits to be signed, or else the champion"),
]
Link = Annotated[Path, Parameter(metavar="LINK", help="symlink to create, or to update")]
Follow = Annotated[
    bool, Parameter(help="keep running and update the link after each change of the champion, until Ctrl-C")
]


def serve(
    name: Registered,
    /,
    *overrides: EngineOverrides,
    store: Store = DEFAULT_STORE,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    alias: PolicyAlias = "champion",
    every: Every = 5.0,
    key_variable: KeyVariable = "RHEOSTAT_SERVE_KEY",
) -> None:
    """Serve the champion with vLLM until Ctrl-C, and switch to the new champion after a promotion or rollback."""
    from rheostat.infra.store.registry import open_existing_registry
    from rheostat.models.engines.vllm.fixed_server import FixedAddressServer
    from rheostat.models.engines.vllm.server import Address
    from rheostat.tasks.promotion.serving import watch_policy

    log_progress(quiet=True)
    registry, configured_key = open_existing_registry(store, name), os.environ.get(key_variable)
    at = Address(host, port, configured_key or secrets.token_urlsafe(32), name)
    server = FixedAddressServer(engine_config(overrides), at)

    def use(champion: "RegistryRecord", files: Path) -> None:
        assert champion.bundle is not None, "who is used has files"
        if server.serve(files, champion.bundle.digest):
            write(f"{at.url(port)}/v1 serves {describe_champion(champion)} as model {name!r}")

    if configured_key is None:
        write(f"export {key_variable}={at.key}")
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(server):
        watch_policy(registry, use, every=_check_interval(every), alias=alias)


def checkout(
    name: Registered,
    /,
    *,
    to: Link,
    alias: PolicyAlias = "champion",
    follow: Follow = False,
    store: Store = DEFAULT_STORE,
    every: Every = 5.0,
) -> None:
    """Create or update a symlink to the champion's model directory, for programs that serve the model themselves."""
    from rheostat.infra.store.registry import open_existing_registry
    from rheostat.tasks.promotion import serving

    log_progress(quiet=True)
    registry = open_existing_registry(store, name)

    def keep(champion: "RegistryRecord", files: Path) -> None:
        if serving.update_link(champion, files, to):
            write(f"{to} now points to {describe_champion(champion)}")

    with contextlib.suppress(KeyboardInterrupt):
        if follow:
            serving.watch_policy(registry, keep, every=_check_interval(every), alias=alias)
        else:
            keep(*serving.policy_files(registry, alias))


def describe_champion(champion: "RegistryRecord") -> str:
    """Describe a champion in one line: the digest of its policy, its run, and the number of its registry record."""
    return f"the policy {champion.policy[:16]} of run {champion.run}, record {champion.number}"


def _check_interval(every: float) -> float:
    if every <= 0:
        raise BadInput(f"--every is {every:g}, but it must be a number of seconds above 0.")
    return every
