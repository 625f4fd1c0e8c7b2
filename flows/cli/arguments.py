"""The arguments of the `rheostat` command."""

import argparse
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from infra.errors import BadInput

DEFAULT_STORE = "./runs"


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong as one line, with the nearest name."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            from infra.validation_errors import nearest

            what = "command" if "COMMAND" in message else message.removeprefix("argument ").partition(":")[0]
            known = re.findall(r"'([^']*)'", choice[2])
            message = f"{what} {choice[1]!r}: expected {', '.join(known)}{nearest(choice[1], known)}"
        raise BadInput(f"{message} (see `{self.prog} --help`)")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; `command` names what to do. Raises BadInput in one line."""
    given = sys.argv[1:] if arguments is None else arguments
    options, others = _parser(simulating="simulate" in given).parse_known_args(given)
    if options.command is None:
        raise BadInput("expected a command, such as `rheostat train configs/demo.toml` (see `rheostat --help`)")
    # argparse gives up on positional arguments after an option: `train CONFIG --run NAME seed=1`.
    if others and "overrides" in options and all("=" in other and not other.startswith("-") for other in others):
        options.overrides += others
    elif others:
        raise BadInput(f"unrecognized arguments: {shlex.join(others)} (see `rheostat --help`)")
    return options


def _parser(*, simulating: bool) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rheostat", description="Retrain language models by reinforcement learning, as a durable batch pipeline."
    )
    parser.add_argument("--version", action="store_const", dest="command", const="version", help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, text: str, *, example: str) -> argparse.ArgumentParser:
        description, epilog = f"{text[:1].upper()}{text[1:]}.", f"example: rheostat {name} {example}".rstrip()
        added = commands.add_parser(name, help=text, description=description, epilog=epilog)
        added.set_defaults(command=name)
        return added

    def reader(name: str, text: str, *, example: str) -> argparse.ArgumentParser:
        added = add(name, text, example=example)
        added.add_argument("--store", default=DEFAULT_STORE, help="where runs lie (default: %(default)s)")
        added.add_argument("--json", action="store_true", help="print JSON")
        if example:
            added.add_argument("run", metavar="RUN", help="name of the run")
        return added

    train = add(
        "train",
        "run the configured job, or continue it",
        example="configs/demo.toml --run longer iterations=40 update.learning_rate=2e-4",
    )
    _add_run(train)
    train.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    train.add_argument("--json", action="store_true", help="print the plan or the summary as JSON")

    def page(name: str, text: str, *, example: str) -> None:
        added = add(name, f"{text}; `rheostat train` goes on from there", example=example)
        _add_run(added)
        added.add_argument("--json", action="store_true", help="print the result as JSON")

    page("sft", "run the configured job as far as the supervised policy", example="configs/rlhf.toml warmup.steps=2000")
    page("dpo", "run the configured job as far as the policy that learnt from preferences", example="configs/dpo.toml")
    page("reward-model", "run the configured job as far as its reward models", example="configs/rlhf.toml")

    reader("runs", "list the runs of a store", example="")
    reader("show", "show a run: iterations, metrics, digests, seconds per stage", example="demo")
    rollouts = reader("rollouts", "read a run's rollouts", example="demo --iteration 3 --sort reward")
    rollouts.add_argument("--iteration", type=int, metavar="N", help="default: the last one")
    rollouts.add_argument(
        "--sort",
        choices=["position", "reward", "length"],
        default="position",
        help="as generated, best first, or longest first (default: %(default)s)",
    )
    rollouts.add_argument("--limit", type=int, metavar="N", default=10, help="completions shown (default: %(default)s)")
    export = reader("export", "copy a run's sealed iterations to Parquet, and print the paths", example="demo")
    export.add_argument("--scores", metavar="NAME", help="a re-scoring (default: the run's own scores)")
    policy = reader("export-policy", "write a run's policy as one model directory", example="demo --to demo-policy")
    policy.add_argument("--to", metavar="DIR", type=Path, required=True, help="a directory that is not there yet")
    policy.add_argument(
        "--iteration", type=int, metavar="N", help="default: after the last one; 0 is the initial policy"
    )
    policy.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="default: float32 where an adapter is added to its base, and as stored otherwise",
    )
    reader("verify", "check every digest and every invariant of a run", example="demo")

    rescore = reader(
        "rescore",
        "score a run's stored rollouts again by other rewards",
        example='demo --rewards \'rewards=[{kind="regex",pattern="####"}]\' --as strict --iterations 3-7',
    )
    rescore.add_argument(
        "--rewards",
        metavar="TOML",
        required=True,
        help="a TOML file with a [scoring] table, or its keys as inline TOML",
    )
    _add_derivation(rescore, "rewards")
    recredit = reader(
        "recredit",
        "give a run's stored rollouts advantages by another algorithm, or from other scores",
        example="demo --algorithm rloo --scores strict --iterations 3-7",
    )
    recredit.add_argument(
        "--algorithm",
        metavar="TOML",
        required=True,
        help="a TOML file with an [algorithm] table, its keys as inline TOML, or its kind alone",
    )
    recredit.add_argument("--scores", metavar="NAME", help="a re-scoring (default: the run's own scores)")
    _add_derivation(recredit, "algorithm")

    evaluate = add(
        "evaluate",
        "measure a policy directory on held-out problems",
        example="path/to/model --config configs/gsm8k.toml evaluation.problems=1319",
    )
    evaluate.add_argument("policy", metavar="POLICY", type=Path, help="model directory in Hugging Face format")
    _add_overrides(evaluate)
    evaluate.add_argument(
        "--config", type=Path, help="TOML file that names the problems (default: the run in which the policy lies)"
    )
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    reader("placement", "show a run's placement decisions, each made again from its inputs", example="judge")
    plan = add("plan", "show which workers a run would begin with", example="configs/judge.toml pools.workers=8")
    plan.add_argument("config", metavar="CONFIG", type=Path, help="TOML file")
    _add_overrides(plan)
    plan.add_argument("--json", action="store_true", help="print JSON")

    simulate = add("simulate", "compare placement policies over simulated workers", example="--workers 8,64")
    if simulating:
        from flows.cli.simulate import add_arguments  # numpy and the simulator: no other command waits for them

        add_arguments(simulate)

    server = add("server", "serve Prefect's API and UI on this machine", example="--port 4300")
    server.add_argument("--port", type=int, default=4200, help="port on loopback (default: %(default)s)")

    engine = add("engine", "install, check and serve an engine in an environment of its own", example="install vllm")
    _add_engine_actions(engine)
    return parser


def _add_engine_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        added = actions.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.")
        added.add_argument("engine", metavar="ENGINE", choices=["vllm"], help="vllm")
        return added

    install = add("install", "make the engine's environment, or find the one that was made")
    install.add_argument("--python", metavar="PATH", type=Path, help="interpreter to make it with (default: this one)")
    install.add_argument("--into", metavar="DIR", type=Path, help="default: where configurations look for it")
    install.add_argument(
        "--platform", choices=["cpu", "cuda"], help="build (default: cuda where there is an NVIDIA driver, else cpu)"
    )
    check = add("check", "import the engine in its environment, and print the versions")
    check.add_argument("--python", metavar="PATH", type=Path, help="Python to ask (default: the installed one's)")
    for added in (install, check):
        added.add_argument("--json", action="store_true", help="print JSON")
    serve = add("serve", "serve a policy's shape here until Ctrl-C, for workers that own no server")
    serve.add_argument("directory", metavar="DIRECTORY", type=Path, help="model directory in Hugging Face format")
    text = "keys of the engine's configuration, such as dtype=bfloat16 or tensor_parallel=2"
    serve.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)
    serve.add_argument("--port", type=int, help="port on loopback (default: a free one)")
    serve.add_argument("--adapter-rank", type=int, default=0, metavar="N", help="largest rank of adapters (default: 0)")
    serve.add_argument(
        "--key-variable",
        metavar="NAME",
        default="RHEOSTAT_ENGINE_KEY",
        help="environment variable with the key; a key is made where it is not set (default: %(default)s)",
    )


def _add_derivation(parser: argparse.ArgumentParser, made_from: str) -> None:
    parser.add_argument("--as", dest="name", metavar="NAME", help=f"default: from the {made_from}")
    parser.add_argument("--iterations", metavar="3-7", help="such as 3, 3-7 or 1,3-5 (default: all that are sealed)")
    text = "how it is done: pools.workers=4, pools.scoring_workers=8, pools.gpus_per_worker=1"
    parser.add_argument("overrides", nargs="*", default=[], metavar="pools.key=value", help=text)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="TOML file")
    _add_overrides(parser)
    parser.add_argument("--run", metavar="NAME", help="name of the run (default: the configuration's)")
    parser.add_argument("--store", help="where runs lie (default: the configuration's)")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    text = "dotted keys of the configuration, such as update.learning_rate=1e-4; `key=` goes back to the default"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)
