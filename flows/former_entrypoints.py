"""Support for the entrypoints of deployments from before the package `rheostat`, such as `flows.train.train`.

It works in process work pools. Prefect loads this module in workers (entry point group `prefect.collections` in
pyproject.toml). The module then switches on Prefect's plugins for the processes of flow runs, which inherit the
worker's environment. In these processes Prefect calls `setup_environment` (entry point group `prefect.plugins`) before
it imports the flow.
"""

import os
from importlib import import_module
from typing import Any, Final

from prefect.plugins import HookContext, register_hook

from rheostat.infra.former_names import allow_former_imports

PREFECT_FIRST: Final = (
    "import prefect, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Program that imports Prefect and then runs the script that its first argument names."""

os.environ.setdefault("PREFECT_PLUGINS_ENABLED", "true")


@register_hook
def setup_environment(*, ctx: HookContext) -> None:
    """Let Prefect import flows by their former names."""
    allow_former_imports()


def import_prefect_before_hooks() -> None:
    """Change Prefect in this worker so that the processes for the hooks of a flow run, such as those of a cancellation,
    import Prefect before they run its script. The script imports Prefect while an event loop runs, and then plugins
    fail with a traceback in the worker's log."""
    prefect_hooks: Any = import_module("prefect.runner._workspace_hook_runner")
    original = prefect_hooks.run_process

    async def run_process(command: list[str], **options: object) -> object:
        place = next((index for index, word in enumerate(command) if word.endswith("_bootstrap.py")), None)
        program = command if place is None else [*command[:place], "-c", PREFECT_FIRST, *command[place:]]
        return await original(program, **options)

    prefect_hooks.run_process = run_process


import_prefect_before_hooks()
