"""The `rheostat` command: its commands in the order of the help, each a function of this folder with an example.

Their modules import what is heavy when they are called.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal

from cyclopts import App, Parameter

from flows.cli import (
    engines,
    init,
    lineage,
    prefect_api,
    registry,
    reports,
    rescore,
    retention,
    retriever,
    runs,
    serving,
    soup,
    sweep,
    tracking,
    train,
)
from flows.cli.prefect_api import set_defaults
from infra.commit import find_commit
from infra.errors import BadInput
from infra.processes.watch import ended_by_signals
from infra.terminal import command_app, run_command, write


def completion(shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(name="SHELL")], /) -> None:
    """Print what a shell needs to complete commands, options and names of runs."""
    write(app().generate_completion(shell=shell))


COMMANDS: Final[tuple[tuple[Callable[..., int | None], str], ...]] = (
    (init.init, "my-job"),
    (train.train, "configs/demo.toml --run longer iterations=40 update.learning_rate=2e-4"),
    (registry.retrain, "configs/weekly.toml --times 3"),
    (registry.gate, "configs/weekly.toml"),
    (registry.registry, "assistant"),
    (registry.promote, """assistant weekly-20261130 --reason 'read fifty answers'"""),
    (registry.refuse, """assistant weekly-20261130 --reason 'made up sources'"""),
    (registry.rollback, """assistant --reason 'refuses too often'"""),
    (registry.mirror, "assistant --to sqlite:///mlflow.db"),
    (serving.serve, "assistant --port 8000"),
    (serving.checkout, "assistant --to models/current --follow"),
    (lineage.lineage, "assistant@champion"),
    (sweep.sweep, "configs/demo.toml update.learning_rate=1e-3,3e-3 seed=0,1 --limit 2"),
    (train.sft, "configs/rlhf.toml warmup.steps=2000"),
    (train.dpo, "configs/dpo.toml"),
    (train.reward_model, "configs/rlhf.toml"),
    (runs.runs, "--store ./runs"),
    (runs.show, "demo"),
    (runs.plot, "demo longer --to curves.png"),
    (runs.watch, "demo --store s3://bucket/runs"),
    (reports.report, "demo --open"),
    (reports.compare, "demo longer --to compared.html"),
    (runs.rollouts, "demo --iteration 3 --sort reward"),
    (runs.media, "demo 3f9a --to picture.png"),
    (runs.export, "demo"),
    (runs.query, "'select iteration, avg(reward) from rollouts group by iteration' demo"),
    (tracking.track, """demo --tracking 'kind="tensorboard"'"""),
    (tracking.metrics, "--port 9464"),
    (runs.export_policy, "demo --to demo-policy"),
    (soup.merge, "demo@12=0.7 longer=0.3 --to merged"),
    (soup.soup, "configs/soup.toml soup.method=rewarded"),
    (soup.soup_front, "soup --to front.svg"),
    (soup.soup_policy, "soup --preference 0.3,0.7 --to policy"),
    (retriever.retriever, "configs/retriever.toml method=self-distillation"),
    (runs.verify, "demo"),
    (runs.copy, "demo ./runs s3://bucket/runs"),
    (retention.gc, "--older-than 30d --keep 5 --tag paper --delete"),
    (retention.forget, "demo --prompt-ids ids.txt --delete"),
    (rescore.rescore, """demo --rewards 'rewards=[{kind="regex",pattern="####"}]' --as strict --iterations 3-7"""),
    (rescore.recredit, "demo --algorithm rloo --scores strict --iterations 3-7"),
    (train.evaluate, "path/to/model --config configs/gsm8k.toml evaluation.problems=1319"),
    (runs.placement, "judge"),
    (train.plan, "configs/judge.toml pools.workers=8"),
    (prefect_api.server, "--port 4300"),
    (completion, "bash >> ~/.bashrc"),
)

ACTIONS: Final[tuple[tuple[Callable[..., None], str], ...]] = (
    (engines.install, "vllm --platform cpu"),
    (engines.check, "vllm"),
    (engines.serve, "vllm path/to/model dtype=bfloat16 --port 8000"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; see `run_command` for its exit code. What it writes is for its user alone."""
    os.umask(os.umask(0o077) | 0o077)
    set_defaults()  # before a command imports Prefect, which would send its first notice then
    again = "the same command continues"
    with ended_by_signals(f"rheostat: interrupted; {again}"):
        return run_command(app(), arguments, again=again)


def app() -> App:
    """Make the command with all that it can do."""
    summary = "Retrain language models by reinforcement learning, as a durable batch pipeline."
    made = command_app("rheostat", summary, version=_version)
    made.default(_no_command)
    engine = command_app("engine", "Install, check and serve an engine in an environment of its own.")
    engine.default(_no_action)
    engine.sort_key = len(COMMANDS)
    for parent, words, commands in ((made, "rheostat", COMMANDS), (engine, "rheostat engine", ACTIONS)):
        for place, (function, example) in enumerate(commands):
            name = function.__name__.replace("_", "-")
            parent.command(function, name=name, help_epilogue=f"example: {words} {name} {example}", sort_key=place)
    made.command(engine)
    return made


def _no_command() -> None:
    raise BadInput("expected a command, such as `rheostat train configs/demo.toml` (see `rheostat --help`)")


def _no_action() -> None:
    raise BadInput("expected an action, such as `rheostat engine install vllm` (see `rheostat engine --help`)")


def _version() -> str:
    """Return the version and the commit that Rheostat was built from or runs in."""
    from importlib.metadata import version

    commit = find_commit()
    return f"rheostat {version('rheostat')}{f' ({commit})' if commit else ''}"


if __name__ == "__main__":
    sys.exit(main())
