"""Names for scripts and notebooks: flows, configuration classes, and functions that read runs (docs/library.md).

This file is the package `rheostat` itself. Each name is imported when it is first used, so `import rheostat` loads
neither torch nor Ray nor Prefect. The packages `rheostat.flows`, `rheostat.tasks`, `rheostat.models`,
`rheostat.placement` and `rheostat.infra` are the folders of the same name.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rheostat.flows.cli.prefect_api import prefect_api
    from rheostat.flows.dpo import dpo
    from rheostat.flows.evaluation import evaluate
    from rheostat.flows.rescoring import recredit, rescore
    from rheostat.flows.reward_modelling import reward_model
    from rheostat.flows.sft import sft
    from rheostat.flows.train import train
    from rheostat.infra.config import PoolsConfig
    from rheostat.infra.errors import BadInput
    from rheostat.models.config.data import FileData
    from rheostat.models.config.engines import SamplingConfig
    from rheostat.models.config.policy import DirectoryPolicy, ScratchPolicy
    from rheostat.models.config.rollout import RolloutConfig
    from rheostat.models.config.training import EvaluationConfig, WarmupConfig
    from rheostat.tasks.config.run import RunConfig, load_config
    from rheostat.tasks.run.preflight import preflight
    from rheostat.tasks.views.export import export_run
    from rheostat.tasks.views.runs import describe_run, read_rollouts

__all__ = [
    "BadInput",
    "DirectoryPolicy",
    "EvaluationConfig",
    "FileData",
    "PoolsConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "ScratchPolicy",
    "WarmupConfig",
    "describe_run",
    "dpo",
    "evaluate",
    "export_run",
    "load_config",
    "prefect_api",
    "preflight",
    "read_rollouts",
    "recredit",
    "rescore",
    "reward_model",
    "sft",
    "train",
]

_NAMES: Final = {
    "flows.cli.prefect_api": ("prefect_api",),
    "flows.dpo": ("dpo",),
    "flows.evaluation": ("evaluate",),
    "flows.rescoring": ("recredit", "rescore"),
    "flows.reward_modelling": ("reward_model",),
    "flows.sft": ("sft",),
    "flows.train": ("train",),
    "infra.config": ("PoolsConfig",),
    "infra.errors": ("BadInput",),
    "models.config.data": ("FileData",),
    "models.config.engines": ("SamplingConfig",),
    "models.config.policy": ("DirectoryPolicy", "ScratchPolicy"),
    "models.config.rollout": ("RolloutConfig",),
    "models.config.training": ("EvaluationConfig", "WarmupConfig"),
    "tasks.config.run": ("RunConfig", "load_config"),
    "tasks.run.preflight": ("preflight",),
    "tasks.views.export": ("export_run",),
    "tasks.views.runs": ("describe_run", "read_rollouts"),
}
"""Public names of each module."""


def __getattr__(name: str) -> object:
    """Import a public name from its module. Raises AttributeError for all other names."""
    for module, names in _NAMES.items():
        if name in names:
            if module.startswith("flows."):  # Prefect reads its settings when it is imported
                import_module("rheostat.flows.cli.prefect_api").set_defaults()
            return getattr(import_module(f"rheostat.{module}"), name)
    raise AttributeError(f"module 'rheostat' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names and the attributes that this module has already."""
    return sorted({*globals(), *__all__})
