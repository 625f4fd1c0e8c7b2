"""Support for the entrypoints of deployments from before the package `rheostat`, such as `flows.train.train`.

It works in process work pools. Prefect loads this module in workers (entry point group `prefect.collections` in
pyproject.toml). The module then switches on Prefect's plugins for the processes of flow runs, which inherit the
worker's environment. In these processes Prefect calls `setup_environment` (entry point group `prefect.plugins`) before
it imports the flow.
"""

import os

from prefect.plugins import HookContext, register_hook

from rheostat.infra.former_names import allow_former_imports

os.environ.setdefault("PREFECT_PLUGINS_ENABLED", "true")


@register_hook
def setup_environment(*, ctx: HookContext) -> None:
    """Let Prefect import flows by their former names."""
    allow_former_imports()
