"""Commands that run a job or a part of it in this process, or show the workers with which it would start."""

import asyncio
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from rheostat.flows.cli.options import (
    DEFAULT_DISPLAY,
    DEFAULT_STORE,
    Config,
    Display,
    Named,
    Overrides,
    StoredIn,
    format_next_steps,
    log_progress,
)
from rheostat.flows.cli.prefect_api import prefect_api, run_flow
from rheostat.flows.cli.runs import describe_base_model, export_command
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import register_target_folder
from rheostat.infra.processes.guard import guarded_directory
from rheostat.infra.terminal import Json, parse_whole_number, table, wrap_text, write

if TYPE_CHECKING:
    from rheostat.tasks.config.run import RunConfig
    from rheostat.tasks.training_report import TrainedPolicy, TrainedRewards
    from rheostat.tasks.views.metrics import Accuracy
    from rheostat.tasks.views.summary import RunSummary

logger = logging.getLogger(__name__)

AcceptChange = Annotated[
    bool, Parameter(help="resume even if reward code, data files or library versions have changed")
]
DryRun = Annotated[bool, Parameter(help="check everything and print the plan, without writing anything")]
PolicyName = Annotated[
    str,
    Parameter(name="POLICY", help="model directory in Hugging Face format, or the name of a model on the Hub"),
]
OnDevice = Annotated[
    str | None,
    Parameter(
        metavar="GPU", show_default="the first placement here", help="estimate an iteration on this GPU, such as h100"
    ),
]
MeanTokens = Annotated[
    int | None,
    Parameter(
        converter=parse_whole_number,
        metavar="N",
        show_default="half of the maximum",
        help="mean tokens of a completion, for --device",
    ),
]
Problems = Annotated[
    Path | None, Parameter(show_default="the run that contains the policy", help="configuration file with the problems")
]


PARTS: Final = {"sft": "sft", "dpo": "dpo", "reward-model": "reward_modelling"}
"""Module in `flows` of each CLI command that runs only a part of a job. Keys are the names of the commands."""


@dataclass(frozen=True, slots=True)
class JobArguments:
    """Command-line arguments that select a job: the configuration file, overrides of its settings, the run name and the
    store."""

    path: Path
    overrides: tuple[str, ...]
    run: str | None
    store: str | None

    def load(self) -> "RunConfig":
        """Read and validate the configuration, with the overrides applied. The configuration's folder is added to the
        folders that are searched for user code. Raises BadInput if the configuration is invalid."""
        from rheostat.tasks.config.run import load_config

        name = [f"name={json.dumps(self.run)}"] if self.run is not None else []
        store_override = [f"store={json.dumps(self.store)}"] if self.store is not None else []
        register_target_folder(self.path.parent)
        return load_config(self.path, [*self.overrides, *name, *store_override])

    def next_steps(self, config: "RunConfig") -> str:
        """Return a text with commands that the user may want to run next. The commands work in the same directory
        without changes."""
        here = "rheostat" if shutil.which("rheostat") == shutil.which(sys.argv[0]) else sys.argv[0]
        store = ["--store", config.store] if config.store != DEFAULT_STORE else []
        changed = [override for override in self.overrides if not override.startswith("iterations=")]
        again = [str(self.path), *changed, f"iterations={config.iterations + 8}"]
        again += ["--run", self.run] if self.run is not None else []
        again += ["--store", self.store] if self.store is not None else []
        steps = {
            "show completions": ["rollouts", config.name, "--sort", "reward", *store],
            "show all iterations": ["show", config.name, *store],
            "serve Prefect's UI at http://127.0.0.1:4200: flows, artifacts, logs": ["server"],
            "train longer": ["train", *again],
        }
        return format_next_steps({what: shlex.join([here, *words]) for what, words in steps.items()})


def train(
    config: Config,
    /,
    *overrides: Overrides,
    run: Named = None,
    store: StoredIn = None,
    accept_change: AcceptChange = False,
    dry_run: DryRun = False,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Run the configured job, or continue it from its last stored result."""
    from rheostat.flows.cli.live import show_checks
    from rheostat.flows.cli.plan import plan_run

    job = JobArguments(config, overrides, run, store)
    loaded = job.load()
    if dry_run:
        with show_checks(as_json=as_json):
            plan = plan_run(loaded, accept_change=accept_change)
        write(plan.model_dump_json(indent=2) if as_json else plan.text())
        return
    with show_progress(loaded, display, as_json=as_json):
        summary = train_here(loaded, accept_change=accept_change, port=display.port)
    write(
        summary.model_dump_json(indent=2)
        if as_json
        else f"{describe_results(summary, loaded)}\n{job.next_steps(loaded)}"
    )


def sft(
    config: Config,
    /,
    *overrides: Overrides,
    run: Named = None,
    store: StoredIn = None,
    accept_change: AcceptChange = False,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Run the configured job up to the end of supervised fine-tuning; `rheostat train` continues from there."""
    job = JobArguments(config, overrides, run, store)
    _run_and_print("sft", job, accept_change=accept_change, display=display, as_json=as_json)


def dpo(
    config: Config,
    /,
    *overrides: Overrides,
    run: Named = None,
    store: StoredIn = None,
    accept_change: AcceptChange = False,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Run the configured job up to the end of preference optimization; `rheostat train` continues from there."""
    job = JobArguments(config, overrides, run, store)
    _run_and_print("dpo", job, accept_change=accept_change, display=display, as_json=as_json)


def reward_model(
    config: Config,
    /,
    *overrides: Overrides,
    run: Named = None,
    store: StoredIn = None,
    accept_change: AcceptChange = False,
    display: Display = DEFAULT_DISPLAY,
    as_json: Json = False,
) -> None:
    """Run the configured job up to its trained reward models; `rheostat train` continues from there."""
    job = JobArguments(config, overrides, run, store)
    _run_and_print("reward-model", job, accept_change=accept_change, display=display, as_json=as_json)


def evaluate(policy: PolicyName, /, *overrides: Overrides, config: Problems = None, as_json: Json = False) -> None:
    """Evaluate a policy on held-out problems: a model directory, or a model on the Hugging Face Hub."""
    log_progress(quiet=True)
    accuracy = evaluate_here(policy, config_path=config, overrides=overrides)
    write(accuracy.model_dump_json(indent=2) if as_json else f"held-out accuracy {accuracy.line()}")


def plan(
    config: Config, /, *overrides: Overrides, device: OnDevice = None, tokens: MeanTokens = None, as_json: Json = False
) -> None:
    """Show the workers and memory with which a run would start, or estimate an iteration on other GPUs."""
    from rheostat.flows.cli.live import show_checks
    from rheostat.flows.cli.output import assumption_rows
    from rheostat.flows.cli.plan import plan_memory
    from rheostat.tasks.config.run import load_config
    from rheostat.tasks.views.placement import first_placement

    register_target_folder(config.parent)
    loaded = load_config(config, overrides)
    if device is not None:
        _print_estimate(loaded, device, tokens, as_json=as_json)
        return
    with show_checks(as_json=as_json):
        memory = plan_memory(loaded)
    first = first_placement(loaded) if loaded.scoring.hosted_rewards else None
    if as_json:
        placement = {} if first is None else first.model_dump(mode="json")
        write(json.dumps({"decision": None, "inputs": None, **placement, "memory": memory}, indent=2))
        return
    if first is not None:
        write(f"{first.decision.reason}\n")
        write(table(assumption_rows(first.inputs)))
        write("\nThese lengths and step times are assumptions, which measurements replace after the first iteration.\n")
    else:
        write(f"All {loaded.pools.workers.max} workers generate completions: no reward model needs worker slots.\n")
    for name, memory_text in memory.items():
        write(wrap_text(f"{name:<14}  {memory_text}", indent=16))


def _print_estimate(config: "RunConfig", device: str, tokens: int | None, *, as_json: bool) -> None:
    from rheostat.flows.cli.live import show_checks
    from rheostat.flows.cli.plan import plan_device
    from rheostat.tasks.views.estimate import NOT_COUNTED

    with show_checks(as_json=as_json):
        estimate = plan_device(config, device, completion_tokens=tokens)
    if as_json:
        write(estimate.model_dump_json(indent=2))
        return
    write(f"{estimate.device}\n{estimate.rollout_devices} for rollout, {estimate.update_devices} for the update\n")
    write(table(estimate.rows))
    write("\n" + "\n".join(memory.text for memory in estimate.memory))
    for conflict in estimate.conflicts:
        write(wrap_text(conflict))
    write(
        f"\nThis is a lower bound for completions of {estimate.completion_tokens} tokens (--tokens). Real iterations "
        f"are slower.\n{NOT_COUNTED}."
    )


def train_here(config: "RunConfig", *, accept_change: bool = False, port: int | None = None) -> "RunSummary":
    """Train the configured job in this process, or continue it. `port` is the local port of Prefect's UI. Raises
    BadInput before anything is written or started if an input is invalid."""
    with open_job(config, "rheostat.flows.train", accept_change=accept_change, port=port) as config:
        from rheostat.flows.train import train as train_flow

        return run_flow(train_flow(config, accept_change=accept_change))


def run_part(
    command: str, config: "RunConfig", *, accept_change: bool = False, port: int | None = None
) -> "TrainedPolicy | TrainedRewards":
    """Run or continue the job in this process, up to the end of one stage. `command` names the stage: "sft", "dpo" or
    "reward-model". Raises BadInput before anything is written or started if an input is invalid."""
    from rheostat.tasks.config.run import require_part

    require_part(command, config)
    with open_job(config, f"rheostat.flows.{PARTS[command]}", accept_change=accept_change, port=port) as config:
        match command:
            case "sft":
                from rheostat.flows.sft import sft as sft_flow

                return run_flow(sft_flow(config, accept_change=accept_change))
            case "dpo":
                from rheostat.flows.dpo import dpo as dpo_flow

                return run_flow(dpo_flow(config, accept_change=accept_change))
            case "reward-model":
                from rheostat.flows.reward_modelling import reward_model as reward_model_flow

                return run_flow(reward_model_flow(config, accept_change=accept_change))
    raise AssertionError(f"there is no part of a job with the name {command!r}")


def evaluate_here(policy: str, *, config_path: Path | None, overrides: Sequence[str]) -> "Accuracy":
    """Evaluate a policy on held-out problems, in a temporary store that is deleted afterwards. `policy` is a directory,
    an address or the name of a model on the Hugging Face Hub."""
    from rheostat.tasks.run.hub_inputs import with_hub_commits
    from rheostat.tasks.run.preflight import mark_as_checked, preflight, with_data_sized_defaults

    with guarded_directory("rheostat-evaluate-") as scratch:
        config = _build_evaluation_config(policy, config_path, overrides).model_copy(update={"store": str(scratch)})
        config = with_hub_commits(config)
        result = asyncio.run(preflight(config))
        config, _ = with_data_sized_defaults(config, result.facts)
        for line in result.notes:
            logger.info("%s", line)
        with mark_as_checked(), prefect_api("rheostat.flows.evaluation"):
            from rheostat.flows.evaluation import evaluate as evaluate_flow

            return run_flow(evaluate_flow(config))


@contextmanager
def open_job(
    config: "RunConfig", flow: str, *, accept_change: bool = False, port: int | None = None
) -> Iterator["RunConfig"]:
    """Check the inputs of a job, then run the block with a Prefect API available. `flow` is the module of the job's
    flow, which is imported while the API starts.

    Yields the configuration with the defaults that its inputs determine. Raises BadInput before anything is written or
    started.
    """
    from rheostat.tasks.run.dependencies import find_matching_run
    from rheostat.tasks.run.preflight import (
        mark_as_checked,
        preflight,
        with_data_sized_defaults,
        with_recorded_defaults,
    )

    config = with_recorded_defaults(config)
    existing = find_matching_run(config, accept_change=accept_change)
    if existing is not None:
        existing.check_unlocked()
    result = asyncio.run(preflight(config))
    config, adaptations = with_data_sized_defaults(config, result.facts)
    logger.info("run %s: %s, in %s", config.name, _describe_run(config), config.store)
    for line in (*result.notes, *adaptations):
        logger.info("%s", line)
    with mark_as_checked(), prefect_api(flow, port=port) as url:
        logger.info("Prefect's UI: %s", url.removesuffix("/api"))
        yield config


def _describe_run(config: "RunConfig") -> str:
    """Describe a run in a few words: its algorithm, and its numbers of iterations, prompts and completions."""
    rollout = config.rollout
    iterations, prompts = format_count(config.iterations, "iteration"), format_count(rollout.prompts, "prompt")
    completions = format_count(rollout.group_size, "completion")
    return f"{config.algorithm.label}, {iterations} of {prompts} × {completions}"


@contextmanager
def show_progress(config: "RunConfig", display: Display, *, as_json: bool) -> Iterator[None]:
    """Run the block while the progress of a run is shown in the terminal. With `as_json`, only the result is
    printed."""
    from rheostat.flows.cli.live import show_run

    verbosity, total = display.verbosity, config.iterations
    with show_run(config.store, config.name, iterations=total, verbosity=verbosity, as_json=as_json):
        yield


def _run_and_print(command: str, job: JobArguments, *, accept_change: bool, display: Display, as_json: bool) -> None:
    config = job.load()
    with show_progress(config, display, as_json=as_json):
        result = run_part(command, config, accept_change=accept_change, port=display.port)
    write(result.model_dump_json(indent=2) if as_json else f"\n{result.text()}")


def describe_results(summary: "RunSummary", config: "RunConfig") -> str:
    """Describe the results of a run as lines of text: accuracy, cost, and locations of report, plot, run and policy."""
    from rheostat.tasks.views.summary import summary_lines

    lines = [
        f"\n{summary_lines(summary)}",
        *([f"report   {summary.report}"] if summary.report else []),
        f"plot     {summary.plot}\nrun      {summary.path}",
        f"policy   {summary.policy}{describe_base_model(summary.base)}\ndigest   {summary.digest}",
    ]
    if summary.base:
        lines.append(f"export   {export_command(config.name, config.store)}")
    return "\n".join(lines)


def _build_evaluation_config(policy: str, config_path: Path | None, overrides: Sequence[str]) -> "RunConfig":
    from rheostat.infra.store.dependencies import recorded_config
    from rheostat.infra.store.inputs import format_path, has_run, is_on_hub, is_remote, read_model_path
    from rheostat.infra.store.runs import open_run
    from rheostat.tasks.config.run import override_config

    path = read_model_path(policy)
    place = path if is_remote(path) else path.resolve()
    if has_run(place):
        raise BadInput(
            f"{format_path(path)} is the folder of a run, but evaluate needs the directory of a policy. `rheostat "
            f"show {place.name}` lists the policies of the run."
        )
    if config_path is not None:
        config = JobArguments(config_path, tuple(overrides), None, None).load()
    else:
        home = None if is_on_hub(path) else next((parent for parent in place.parents if has_run(parent)), None)
        if home is None:
            raise BadInput(
                f"The policy {policy} does not belong to a run, so the problems to evaluate on are "
                "unknown. Set --config to a configuration file with the problems."
            )
        document = recorded_config(open_run(format_path(home.parent), home.name))
        config = override_config(document, overrides, source=f"run {home.name}", recorded=True)
    directory = config.policy.with_path(path)
    return config.model_copy(update={"name": "evaluate", "policy": directory, "warmup": None, "iterations": 0})
