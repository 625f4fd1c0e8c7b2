"""The `rheostat` command line. Each command is a function in this folder, listed here with an example.

The modules of the commands import slow packages, such as Prefect and torch, only when a command is called.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

from cyclopts import App, Group, Parameter

from rheostat.flows.cli import (
    bisect,
    engines,
    fork,
    init,
    lineage,
    prefect_api,
    registry,
    reports,
    rescore,
    retention,
    retriever,
    rewards,
    runs,
    serving,
    soup,
    sweep,
    tracking,
    train,
    unlearn,
    what_if,
)
from rheostat.flows.cli.prefect_api import set_defaults
from rheostat.infra.commit import find_commit
from rheostat.infra.errors import BadInput
from rheostat.infra.processes.watch import ended_by_signals
from rheostat.infra.terminal import command_app, run_command, write


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(name="SHELL")], /) -> None:
    """Print a script for your shell that completes the commands, options and run names of `rheostat`."""
    write(app().generate_completion(shell=shell))


Command = tuple[Callable[..., int | None], str]
"""Function that implements a CLI command, and the example arguments that the help of the command shows."""

GROUPS: Final[tuple[tuple[str, tuple[Command, ...]], ...]] = (
    (
        "Start a job",
        (
            (init.init, "my-job"),
            (train.plan, "configs/judge.toml pools.workers=8"),
            (rewards.rewards, "json_schema"),
            (prefect_api.server, "--port 4300"),
            (completion, "bash >> ~/.bashrc"),
        ),
    ),
    (
        "Train and evaluate",
        (
            (train.train, "configs/demo.toml --run longer iterations=40 update.learning_rate=2e-4"),
            (train.sft, "configs/rlhf.toml warmup.steps=2000"),
            (train.dpo, "configs/dpo.toml"),
            (train.reward_model, "configs/rlhf.toml"),
            (train.evaluate, "path/to/model --config configs/gsm8k.toml evaluation.problems=1319"),
            (sweep.sweep, "configs/demo.toml update.learning_rate=1e-3,3e-3 seed=0,1 --limit 2"),
            (fork.fork, "demo@12 higher-rate update.learning_rate=1e-3"),
            (what_if.what_if, "demo lower-rate update.learning_rate=2e-4"),
            (bisect.bisect, "assistant-20261116 assistant-20261123 why-worse --dry-run"),
            (unlearn.unlearn, "assistant assistant-2 --prompt-ids ids.txt --dry-run"),
        ),
    ),
    (
        "Inspect runs",
        (
            (runs.runs, "--store ./runs"),
            (runs.show, "demo"),
            (runs.watch, "demo --store s3://bucket/runs"),
            (runs.plot, "demo longer --to curves.png"),
            (reports.report, "demo --open"),
            (reports.compare, "demo longer --to compared.html"),
            (runs.rollouts, "demo --iteration 3 --sort reward"),
            (runs.media, "demo 3f9a --to picture.png"),
            (runs.query, "'select iteration, avg(reward) from rollouts group by iteration' demo"),
            (runs.placement, "judge"),
            (tracking.track, """demo --tracking 'kind="tensorboard"'"""),
            (tracking.metrics, "--port 9464"),
        ),
    ),
    (
        "Promote and serve policies",
        (
            (registry.retrain, "configs/weekly.toml --times 3"),
            (registry.gate, "configs/weekly.toml"),
            (registry.registry, "assistant"),
            (registry.promote, """assistant weekly-20261130 --reason 'read fifty answers'"""),
            (registry.refuse, """assistant weekly-20261130 --reason 'made up sources'"""),
            (registry.rollback, """assistant --reason 'refuses too often'"""),
            (registry.mirror, "assistant --to sqlite:///mlflow.db"),
            (lineage.lineage, "assistant@champion"),
            (serving.serve, "assistant --port 8000"),
            (serving.checkout, "assistant --to models/current --follow"),
        ),
    ),
    (
        "Manage the store",
        (
            (runs.export, "demo"),
            (runs.export_policy, "demo --to demo-policy"),
            (runs.verify, "demo"),
            (runs.copy, "demo ./runs s3://bucket/runs"),
            (retention.gc, "--older-than 30d --keep 5 --tag paper --delete"),
            (retention.forget, "demo --prompt-ids ids.txt --delete"),
        ),
    ),
    (
        "Rescore, merge and extend",
        (
            (
                rescore.rescore,
                """demo --rewards 'rewards=[{kind="regex",pattern="####"}]' --as strict --iterations 3-7""",
            ),
            (rescore.recredit, "demo --algorithm rloo --scores strict --iterations 3-7"),
            (soup.merge, "demo@12=0.7 longer=0.3 --to merged"),
            (soup.soup, "configs/demos/soup/job.toml soup.method=rewarded"),
            (soup.soup_front, "soup --to front.svg"),
            (soup.soup_policy, "soup --preference 0.3,0.7 --to policy"),
            (retriever.retriever, "configs/retriever.toml method=self-distillation"),
        ),
    ),
)
"""Headings of `rheostat --help`, each with its commands, in the order of the help."""

ACTIONS: Final[tuple[Command, ...]] = (
    (engines.install, "vllm --platform cpu"),
    (engines.check, "vllm"),
    (engines.serve, "vllm path/to/model dtype=bfloat16 --port 8000"),
    (engines.serve_policy, "path/to/model sampling.temperature=0.7 --port 8000"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one `rheostat` command and return its exit code (see `run_command`). Files that the command creates are
    readable only by the user. `arguments` defaults to `sys.argv[1:]`."""
    os.umask(os.umask(0o077) | 0o077)
    set_defaults()  # before a command imports Prefect, which sends usage statistics on import
    again = "run the same command again to continue"
    with ended_by_signals(f"rheostat: interrupted; {again}"):
        return run_command(app(), arguments, again=again)


def app() -> App:
    """Return the `rheostat` command-line app with all commands, under the headings of `GROUPS`."""
    summary = "Retrain language models by reinforcement learning, as a durable batch pipeline."
    rheostat = command_app("rheostat", summary, version=_read_version)
    rheostat.default(_reject_no_command)
    rheostat["--help"].group = rheostat["--version"].group = Group("Options", sort_key=len(GROUPS))
    for place, (title, commands) in enumerate(GROUPS):
        group = Group(title, sort_key=place)
        _add_commands(rheostat, "rheostat", commands, group=group)
    engine = command_app(
        "engine", "Install, check and serve an engine, or install another package, in a separate environment."
    )
    engine.default(_reject_no_action)
    engine.group, engine.sort_key = group, len(commands)
    _add_commands(engine, "rheostat engine", ACTIONS)
    rheostat.command(engine)
    return rheostat


def _add_commands(parent: App, words: str, commands: Sequence[Command], *, group: Group | None = None) -> None:
    """Add commands to an app, in the given order. `words` is the text that a user types before the name of a command,
    such as `rheostat engine`. `group` is the heading of the commands in the help."""
    for place, (function, example) in enumerate(commands):
        name = function.__name__.replace("_", "-")
        parent.command(
            function, name=name, group=group, help_epilogue=f"example: {words} {name} {example}", sort_key=place
        )


def _reject_no_command() -> None:
    raise BadInput("No command was given. Try `rheostat train configs/demo.toml`, or see `rheostat --help`.")


def _reject_no_action() -> None:
    raise BadInput("No action was given. Try `rheostat engine install vllm`, or see `rheostat engine --help`.")


def _read_version() -> str:
    """Return the text of `rheostat --version`: the installed version and, if known, the git commit of the source
    code."""
    from importlib.metadata import version

    commit = find_commit()
    return f"rheostat {version('rheostat')}{f' ({commit})' if commit else ''}"


if __name__ == "__main__":
    sys.exit(main())
