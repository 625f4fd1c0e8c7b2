"""Preflight check of a run's inputs, before anything is written.

The check reads tokenizers and model directories, so it runs in a separate process, because no flow process loads torch.
This module does not need Prefect, which creates directories when it is imported.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Final, Literal

import psutil

from rheostat.infra.config import adopt_recorded
from rheostat.infra.environments.gpus import gpu_memory
from rheostat.infra.errors import BadInput, EndpointDown, WorkerFailed
from rheostat.infra.processes.watch import CHECK_SECONDS, IDLE_SECONDS, WatchedServer, kill_and_wait, run_apart
from rheostat.infra.store.chain import linked_parts
from rheostat.infra.store.run_record import has_results
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.infra.store.storage import open_store
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.promotion import MIN_PROBLEMS, SuiteCheck
from rheostat.tasks.config.gpus import find_memory_conflicts, gpu_layout
from rheostat.tasks.config.run import LAYOUT, RunConfig
from rheostat.tasks.run.hub_inputs import fetch_hub_inputs, with_hub_commits
from rheostat.tasks.run.keys import evaluation_key

PREFLIGHT_COMMAND = (sys.executable, "-P", "-m", "rheostat.models.commands.preflight")
"""Command of the check. `-P` prevents that a user's rheostat.py in the working directory is imported."""


SIZED_BY_DATA: Final = ("rollout.prompts", "evaluation.problems")
"""Keys whose default is lowered to the number of problems in the data. A value set by the user is never lowered."""
_MOST: Final = {"rollout.prompts": "max_prompts", "evaluation.problems": "heldout_problems"}
_COUNTED: Final = {
    "rollout.prompts": ("train_problems", "training problems"),
    "evaluation.problems": ("heldout_problems", "held-out problems"),
}
IMAGE_READINGS: Final = {
    "rotated": "{} rotated upright as their EXIF orientation specifies",
    "color with 16 bits": "{} in color with 16 bits, of which the upper 8 are read",
    "CMYK": "{} in CMYK, converted without a color profile",
}
"""Messages about images that are read in a special way but stay unchanged, by kind of image. Kinds are keys of
`rheostat.models.vision.color_conversion.READINGS`."""
IMAGE_CONVERSIONS: Final = {
    "16 bits": "gray with 16 bits",
    "32 bits": "gray with 32 bits",
    "rounded color": "color with 16 bits, rounded",
}
"""Messages about images that were converted, for kinds of image whose name is not clear. Kinds are keys of
`rheostat.models.vision.color_conversion.CONVERSIONS`."""
LIMITED_BY_PROMPTS: Final = ("rollout.shard_prompts", "update.minibatches")
"""Keys that also get a smaller default if the default of `rollout.prompts` is lowered, for example because the data
file has only a few problems. They may not be larger than `rollout.prompts`."""


def unset_keys(config: RunConfig, keys: Sequence[str] = SIZED_BY_DATA) -> list[str]:
    """Return the keys among `keys` that the user did not set."""
    parts = {key: key.split(".") for key in keys}
    return [key for key, (table, name) in parts.items() if name not in getattr(config, table).model_fields_set]


def with_recorded_defaults(config: RunConfig) -> RunConfig:
    """Return the configuration of a run with recorded values for keys that the user did not set, so that an existing
    run continues as before.

    Defaults that depend on the data are taken from the run's record. Keys that are newer than the run get the value
    that preserves the previous behavior. If the run has no results yet, its record is not used. Names on the Hugging
    Face Hub get the commits that the run recorded, or are resolved for a new run.
    """
    if config.name not in list_runs(config.store):
        return with_hub_commits(config)
    run = open_run(config.store, config.name)
    config = with_hub_commits(config, run)
    if not has_results(run.store):
        return config
    recorded = run.record.config
    config, unset = adopt_recorded(config, recorded), unset_keys(config, (*SIZED_BY_DATA, *LIMITED_BY_PROMPTS))
    tables = {key: recorded.get(key.partition(".")[0]) for key in unset}
    values = {key: table.get(key.partition(".")[2]) for key, table in tables.items() if isinstance(table, dict)}
    return _with_values(config, {key: value for key, value in values.items() if isinstance(value, int)})


def is_run_complete(config: RunConfig) -> bool:
    """Return whether the run has reached the configured number of iterations and was evaluated there.

    Raises RunChanged if a run with results has another configuration.
    """
    if config.name not in list_runs(config.store):
        return False
    run = open_run(config.store, config.name)
    if not has_results(run.store):
        return False
    run.check_identity(with_recorded_defaults(config), ignored=LAYOUT)
    return evaluation_key(config.iterations) in linked_parts(run)


def with_data_sized_defaults(config: RunConfig, facts: Mapping[str, float]) -> tuple[RunConfig, list[str]]:
    """Return the configuration with defaults adapted to the data that the preflight check measured, and a message about
    each adapted default.

    This function also decides whether to use activation checkpointing, again at each start, because no result depends
    on it. The run records the adapted values and keeps them even if the data files change later.
    """
    values, lines = dict[str, int](), list[str]()
    for key in unset_keys(config):
        limit, default = int(facts[_MOST[key]]), _value_of(config, key)
        if limit < default:
            values[key] = limit
            count_key, split = _COUNTED[key]
            why = ", and their weights allow no more" if limit < facts[count_key] else ""
            hint = _suggest_heldout(config, limit) if key == "evaluation.problems" else ""
            lines.append(
                f"{key} is {limit} instead of its default {default}, because there are {facts[count_key]:.0f} {split}"
                f"{why}.{hint}"
            )
    if config.update.activation_checkpointing is None and "recomputes" in facts:
        values["update.activation_checkpointing"] = bool(facts["recomputes"])
        if facts["recomputes"]:
            kept = facts["kept_activations_bytes"] / 2**30
            lines.append(
                "update.activation_checkpointing is true, because the activations of a micro-batch would need "
                f"{kept:,.1f} GiB otherwise. Set the key yourself to choose."
            )
    if (prompts := values.get("rollout.prompts")) is not None:
        values |= {key: prompts for key in unset_keys(config, LIMITED_BY_PROMPTS) if _value_of(config, key) > prompts}
    return _with_values(config, values), lines


def describe_images(facts: Mapping[str, float], background: str, *, group: str = "images") -> str:
    """Describe how many images of a group were converted to RGB with 8 bits, and how many are read in another way than
    their files suggest. Empty if there are none.

    `background` is the color on which transparent images were composed.
    """
    kinds = {name.partition("/")[2]: number for name, number in facts.items() if name.startswith(f"{group}/")}
    total = kinds.pop("images", 0)
    readings = [text.format(f"{kinds.pop(kind):,.0f}") for kind, text in IMAGE_READINGS.items() if kind in kinds]
    parts = []
    if kinds:
        listed = ", ".join(f"{number:,.0f} {IMAGE_CONVERSIONS.get(kind, kind)}" for kind, number in kinds.items())
        converted = f"{sum(kinds.values()):,.0f} of {total:,.0f} distinct images"
        parts.append(f"{converted} converted to RGB with 8 bits: {listed}")
    parts += [f"transparency on {background}"] if "transparent" in kinds else []
    return "; ".join([*parts, *readings])


def _suggest_heldout(config: RunConfig, num_problems: int) -> str:
    """Return advice that follows the number of held-out problems: how to get more of them, and which features need
    more."""
    data = config.data
    if getattr(data, "heldout_path", None) is not None:
        hint = " To evaluate on more problems, add problems to the file of data.heldout_path."
    elif hasattr(data, "heldout_fraction"):
        hint = " To evaluate on more problems, raise data.heldout_fraction, or set data.heldout_path to another file."
    else:
        hint = ""
    if num_problems < MIN_PROBLEMS:
        hint += (
            f" The paired test of `rheostat compare` and the gate of a retrain need at least {MIN_PROBLEMS} problems."
        )
    return hint


def _value_of(config: RunConfig, key: str) -> int:
    table, _, name = key.partition(".")
    value: int = getattr(getattr(config, table), name)
    return value


def _with_values(config: RunConfig, values: Mapping[str, int]) -> RunConfig:
    for key, value in values.items():
        table, _, name = key.partition(".")
        part = getattr(config, table).model_copy(update={name: value})
        config = config.model_copy(update={table: part})
    return config


_IS_CHECKED: Final = ContextVar("is_checked", default=False)
"""Whether the code that calls a flow has already checked the inputs of the flow's job."""


@contextmanager
def mark_as_checked() -> Iterator[None]:
    """Run the block with flows that do not check their inputs, because the caller has already checked the inputs of the
    job."""
    token = _IS_CHECKED.set(True)
    try:
        yield
    finally:
        _IS_CHECKED.reset(token)


def is_checked() -> bool:
    """Return whether the caller of a flow has already checked the inputs of the flow's job."""
    return _IS_CHECKED.get()


_REPORT: Final = ContextVar[Callable[[str], None]]("report", default=lambda part: None)
"""Function that is called with the name of each part of the configuration before the part is checked."""
MAX_LINE_BYTES: Final = 2**26
"""Maximum length in bytes of a line that the process of the check prints."""
PROGRESS: Final = b'{"checking":'
"""Start of the lines that name the part which is checked next."""


@contextmanager
def report_checks(report: Callable[[str], None]) -> Iterator[None]:
    """Run the block, in which `report` is called with the name of each part of a configuration before the part is
    checked."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


async def preflight(
    config: RunConfig, *, part: Literal["run", "plan", "scoring"] = "run", checked: SuiteCheck | None = None
) -> CheckResult:
    """Run the preflight check and return what it measured, such as numbers of problems and bytes of memory, with notes
    for the user.

    `part` selects the checks: "run" checks data, policy directory, rewards and lengths, "plan" does the same without
    writing to the store, and "scoring" checks only the rewards for stored rollouts. `checked` adds a comparison of a
    suite's problems with the training data of the retrain. The guarantees of the store are tested as well, except for
    the plan of a run in a bucket, because that test writes objects.

    Raises BadInput for bad inputs, EndpointDown if an endpoint does not respond, and WorkerFailed if the check crashes
    or hangs.
    """
    store = open_store(config.store)
    await run_apart(partial(fetch_hub_inputs, config))
    if part != "plan" or not store.traits.check_writes:
        await run_apart(store.check)
    document = config.model_dump(mode="json")
    if checked is None:
        document["giving_way"] = unset_keys(config)
    else:
        document["checked"] = checked.model_dump(mode="json")
    command, request = [*PREFLIGHT_COMMAND, part], json.dumps(document).encode()
    variables = {**os.environ, "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables, limit=MAX_LINE_BYTES
    )
    checking = asyncio.ensure_future(_communicate(process, request))
    check = WatchedServer("the input check", psutil.Process(process.pid), lambda: False, silent_seconds=IDLE_SECONDS)
    try:
        while not (await asyncio.wait({checking}, timeout=CHECK_SECONDS))[0]:
            if check.failure() is not None and not (await asyncio.wait({checking}, timeout=1))[0]:
                raise WorkerFailed(str(check.problem))
    finally:
        await kill_and_wait(process)
    answer, errors = checking.result()
    try:
        verdict = json.loads(answer)
    except ValueError:
        raise WorkerFailed(
            f"The process that checks the configuration, data and policy failed with exit code {process.returncode}. "
            f"Its last output is: {errors.decode()[-2000:]}"
        ) from None
    if not verdict["ok"]:
        raise (EndpointDown if verdict["is_down"] else BadInput)(verdict["error"])
    if part != "scoring" and config.pools.ray_address is None and gpu_layout(config).shares_gpus:
        memory = await run_apart(gpu_memory)
        for conflict in [] if memory is None else find_memory_conflicts(config, verdict["facts"], memory):
            raise BadInput(conflict)
    return CheckResult(facts=verdict["facts"], notes=verdict["notes"])


async def _communicate(process: Process, request: bytes) -> tuple[bytes, bytes]:
    """Send the configuration to the process of the check, and report each part that it checks. Return the line
    with the result, and the text of the error stream."""
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    assert stdin is not None and stdout is not None and stderr is not None, "the process was started with pipes"
    errors, answer = asyncio.ensure_future(stderr.read()), b""
    with suppress(ConnectionError):  # the process has ended; its error stream contains the reason
        stdin.write(request)
        await stdin.drain()
    stdin.close()
    async for line in stdout:
        if line.startswith(PROGRESS):
            _REPORT.get()(json.loads(line)["checking"])
        else:
            answer = line
    await process.wait()
    return answer, await errors
