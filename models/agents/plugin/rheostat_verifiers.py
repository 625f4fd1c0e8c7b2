"""Tasks and episodes of the package verifiers. This module runs in the Python environment of verifiers, and imports no
module of Rheostat.

An object of `Episodes` is created once in each process from which agents are started. Each episode runs in a process
that is forked from it. As a program, this module prints the tasks of a taskset as JSON lines.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import itertools
import logging
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError
from rheostat_tasks import describe, print_tasks
from verifiers.v1 import harnesses, tasksets
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.env import Env
from verifiers.v1.episode import Episode
from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
from verifiers.v1.task import Task
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import (
    env_config_type,
    load_environment,
    load_harness,
    load_taskset,
    taskset_config_type,
)

KEY = "RHEOSTAT_API_KEY"
"""Environment variable with the key of an episode. verifiers does not pass it on to programs."""


class Episodes:
    """Environment of verifiers, which is loaded once. Each call runs one episode."""

    def __init__(
        self,
        taskset: Mapping[str, Any],
        harness: Mapping[str, Any] | None,
        runtime: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        """Load the environment, and install the programs of its harnesses if they run on this machine. Raises
        ValueError if this fails."""
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # uv
        logging.getLogger("verifiers").setLevel(logging.ERROR)
        shared = {"runtime": runtime} if harness is None else {"runtime": runtime, "harness": harness}
        try:
            _check_module("taskset", taskset["id"], tasksets)
            if harness is not None:
                _check_module("harness", harness["id"], harnesses)
            self.env = _load_environment(taskset, shared, options)
            asyncio.run(_prepare_harnesses(self.env))
        except Exception as error:
            raise ValueError(f"rollout.environment: {_describe(error)}") from error

    async def __call__(self, problem: dict[str, Any], base_url: str, api_key: str) -> dict[str, float] | None:
        """Run the episode of the task in the column `task`, and return its reward. Raises RuntimeError if the episode
        has failed."""
        os.environ[KEY] = api_key
        client = EvalClientConfig(base_url=base_url, api_key_var=KEY)
        task = _build_task(self.env, problem["task"])
        context = ModelContext(model="policy", client=client, sampling=SamplingConfig())
        return _read_rewards(await self.env.run_episode(task, context))


def _load_environment(taskset: Mapping[str, Any], shared: Mapping[str, Any], options: Mapping[str, Any]) -> Env[Any]:
    """Load an environment in which every role has the settings `shared`, unless `options` contains others."""
    kind = env_config_type(taskset["id"], options.get("id", ""))
    fields: dict[str, Any] = {**options, "taskset": dict(taskset)}
    for role, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            fields[role] = {**shared, **options.get(role, {})}
    return load_environment(kind.model_validate(fields))


async def _prepare_harnesses(env: Env[Any]) -> None:
    """Install the programs of harnesses that run as processes on this machine, so that episodes find them."""
    configured = env.config.agent_harnesses()
    for role, agent in agent_config_fields(env.config).items():
        if isinstance(agent.runtime, SubprocessConfig):
            async with provision_runtime(agent.runtime) as runtime:
                await load_harness(configured[role]).setup(runtime)


def _build_task(env: Env[Any], fields: Mapping[str, Any]) -> Task[Any]:
    """Build a task from its fields, without loading the taskset's data again."""
    kind = type(env.taskset).task_type()
    return kind(kind.data_type().model_validate(fields), env.config.taskset.task)


def _read_rewards(episode: Episode[Any, Any, Any]) -> dict[str, float] | None:
    """Return the sum of the rewards of all roles that are trained, or None if there are no rewards. Raises RuntimeError
    if the episode has failed. If a time limit of verifiers ended the episode, its rewards are returned."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    for error in errors:
        if not (episode.is_timeout and error.type == "TimeoutError"):
            raise RuntimeError(f"{error.type}: {error.message}")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is None:
                raise RuntimeError(f"the reward {name!r} was not computed ({trace.stop_condition})")
    return {"reward": sum(trace.reward for trace in traces)} if any(trace.rewards for trace in traces) else None


# ---- tasks
def list_tasks(order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the prompt and the fields of each task. `order` has the keys `taskset` and `limit`."""
    taskset, limit = order["taskset"], order["limit"]
    _check_module("taskset", taskset["id"], tasksets)
    loaded = load_taskset(taskset_config_type(taskset["id"]).model_validate(taskset))
    if limit is None and not loaded.bounded:
        raise ValueError("the taskset has no end. Set data.limit")
    for task in itertools.islice(loaded, limit):
        data = task.data
        text = data.prompt_text or data.description or data.name or f"task {data.idx}"
        yield {"system": data.system_prompt, "prompt": text, "task": data.model_dump(mode="json")}


def _check_module(what: str, name: str, package: ModuleType) -> None:
    """Raise ValueError with the most similar name unless the module of a taskset or harness exists. `package` contains
    the modules that are part of verifiers."""
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    built_in = _list_modules(package.__path__)
    if module in built_in or importlib.util.find_spec(module) is not None:
        return
    near = difflib.get_close_matches(module, [*built_in, *_list_modules(sys.path)], n=1)
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"there is no {what} {name!r}: no module {module!r} is part of verifiers, in its Python environment or next to "
        f"the configuration file{hint}"
    )


def _list_modules(folders: Iterable[str]) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(folders)]


def _describe(error: Exception) -> str:
    """Return an error in one line. Errors of configurations name their fields."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return describe(error)


if __name__ == "__main__":
    print_tasks(list_tasks, _describe)
