"""The `rheostat` command. Commands that only read load neither Prefect nor torch."""

import argparse
import json
import logging
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from flows.cli.arguments import DEFAULT_STORE, parse
from infra.errors import BadInput, RheostatError

if TYPE_CHECKING:
    from tasks.config.run import RunConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 2 for what the user wrote, 1 for what went wrong, 130 or 143 for a signal."""
    try:
        options = parse(arguments)
        return COMMANDS[options.command](options)
    except RheostatError as error:
        sys.stderr.write(f"rheostat: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt as interrupt:
        sys.stderr.write("rheostat: interrupted; the same command continues\n")
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except BrokenPipeError:  # the reader of our output (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        return 0


def _version(_: argparse.Namespace) -> int:
    from importlib.metadata import version

    from flows.cli.output import write

    write(f"rheostat {version('rheostat')}")
    return 0


def _train(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from flows.cli.plan import plan_run
    from flows.cli.train import train_here

    config = _configured(options)
    if options.dry_run:
        plan = plan_run(config)
        width = max(len(name) for name in plan.lines)
        lines = "\n".join(f"{name.ljust(width)}  {value}" for name, value in plan.lines.items())
        write(plan.model_dump_json(indent=2) if options.json else lines)
        return 0
    _log_progress(to=sys.stderr if options.json else sys.stdout)
    summary = train_here(config)
    if options.json:
        write(summary.model_dump_json(indent=2))
        return 0
    from tasks.reporting import accuracy_lines

    write(f"\n{accuracy_lines(summary)}")
    write(f"plot     {summary.plot}\nrun      {summary.path}")
    write(f"policy   {summary.policy}{_added_to(summary.base)}\ndigest   {summary.digest}")
    if summary.base:
        write(f"export   {_export_command(config.name, config.store)}")
    write(_next_steps(options, config))
    return 0


def _configured(options: argparse.Namespace) -> "RunConfig":
    """The configuration of a command that runs a job, or a part of it."""
    from tasks.config.run import load_config

    named = [f"name={json.dumps(options.run)}"] if options.run is not None else []
    stored = [f"store={json.dumps(options.store)}"] if options.store is not None else []
    return load_config(options.config, [*options.overrides, *named, *stored])


def _part(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from flows.cli.train import run_part

    config = _configured(options)
    _log_progress(to=sys.stderr if options.json else sys.stdout)
    result = run_part(options.command, config)
    write(result.model_dump_json(indent=2) if options.json else f"\n{result.text()}")
    return 0


def _next_steps(options: argparse.Namespace, config: "RunConfig") -> str:
    """Commands that work as they stand, from the same directory."""
    here = "rheostat" if shutil.which("rheostat") == shutil.which(sys.argv[0]) else sys.argv[0]
    store = ["--store", config.store] if config.store != DEFAULT_STORE else []
    changed = [override for override in options.overrides if not override.startswith("iterations=")]
    again = [str(options.config), *changed, f"iterations={config.iterations + 8}"]
    again += ["--run", options.run] if options.run is not None else []
    again += ["--store", options.store] if options.store is not None else []
    return (
        f"next     {shlex.join([here, 'rollouts', config.name, '--sort', 'reward', *store])}"
        f"    what the policy writes\n"
        f"         {shlex.join([here, 'show', config.name, *store])}    every iteration\n"
        f"         {shlex.join([here, 'server'])}    Prefect's UI at http://127.0.0.1:4200: flows, artifacts, logs\n"
        f"         {shlex.join([here, 'train', *again])}    train on"
    )


def _evaluate(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from flows.cli.train import evaluate_here

    _log_progress(to=sys.stderr)
    accuracy = evaluate_here(options.policy, config_path=options.config, overrides=options.overrides)
    interval = f"95% interval {accuracy.low:.3f} to {accuracy.high:.3f}"
    text = f"held-out accuracy {accuracy.mean:.3f} ({interval}), {accuracy.problems} problems"
    write(accuracy.model_dump_json(indent=2) if options.json else text)
    return 0


def _runs(options: argparse.Namespace) -> int:
    from flows.cli.output import table, write
    from infra.store.storage import open_store
    from tasks.views.runs import describe_runs, run_rows

    runs = describe_runs(options.store)
    if options.json:
        write(json.dumps([run.model_dump() for run in runs], indent=2))
    else:
        write(table(run_rows(runs)) or f"no runs in {open_store(options.store).uri}")
    return 0


def _show(options: argparse.Namespace) -> int:
    from flows.cli.output import table, write
    from tasks.run.rescorings import derived_line
    from tasks.views.runs import describe_run, iteration_rows

    description = describe_run(options.store, options.run)
    if options.json:
        write(description.model_dump_json(indent=2))
        return 0
    write(f"run {description.name}, made {description.created}, fingerprint {description.fingerprint}")
    for role, engines in description.engines.items():
        write(f"{role} by {'; '.join(engines)}")
    for accuracy in description.evaluations:
        write(
            f"held-out accuracy after iteration {accuracy.number}: {accuracy.mean:.3f} "
            f"(95% interval {accuracy.low:.3f} to {accuracy.high:.3f}, {accuracy.problems} problems)"
        )
    write(table(iteration_rows(description)) or "no sealed iteration yet")
    if description.policy:
        write(f"policy {description.policy}{_added_to(description.base)}")
    if description.base:
        write(f"export {_export_command(options.run, options.store)}")
    if description.derived:
        write(derived_line(description.derived))
    return 0


def _rollouts(options: argparse.Namespace) -> int:
    from flows.cli.output import rollout, write
    from tasks.views.runs import read_rollouts

    if options.limit < 1:
        raise BadInput(f"--limit {options.limit}: expected at least 1")
    samples = read_rollouts(
        options.store, options.run, iteration=options.iteration, order=options.sort, limit=options.limit
    )
    if options.json:
        write(json.dumps([sample.model_dump() for sample in samples], indent=2, ensure_ascii=False))
        return 0
    for sample in samples:
        write(rollout(sample))
    return 0


def _export(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from tasks.views.runs import export_run

    paths = [str(path) for path in export_run(options.store, options.run, scores=options.scores)]
    write(json.dumps(paths, indent=2) if options.json else "\n".join(paths))
    return 0


def _export_policy(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from tasks.views.export import export_policy
    from tasks.views.runs import open_known_run

    run = open_known_run(options.store, options.run)
    done = export_policy(run, options.to, iteration=options.iteration, dtype=options.dtype)
    text = f"{done.path}: policy {done.iteration} of run {done.run}, base and adapter merged"
    write(done.model_dump_json(indent=2) if options.json else text if done.merged else text.partition(",")[0])
    return 0


def _added_to(base: str | None) -> str:
    return "" if base is None else f"\n         an adapter, added to {base}"


def _export_command(run: str, store: str) -> str:
    command = ["rheostat", "export-policy", run, "--to", f"{run}-policy"]
    merged = shlex.join(command + (["--store", store] if store != DEFAULT_STORE else []))
    return f"{merged}    base and adapter merged into one model directory"


def _verify(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from tasks.verification.iterations import verify_run

    problems = verify_run(options.store, options.run)
    if options.json:
        write(json.dumps({"run": options.run, "ok": not problems, "problems": problems}, indent=2))
    else:
        write("\n".join(problems) or f"run {options.run}: every digest and every invariant holds")
    return 1 if problems else 0


def _rescore(options: argparse.Namespace) -> int:
    from flows.cli.rescore import rescore

    _log_progress(to=sys.stderr if options.json else sys.stdout)
    return rescore(options)


def _recredit(options: argparse.Namespace) -> int:
    from flows.cli.rescore import recredit

    _log_progress(to=sys.stderr if options.json else sys.stdout)
    return recredit(options)


def _placement(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from flows.cli.placement import decision_text, replay_run

    lines = replay_run(options.store, options.run)
    if options.json:
        write(json.dumps([line.model_dump() for line in lines], indent=2))
    else:
        nothing = f"run {options.run}: no decision yet; roles compete for workers only where reward models have slots"
        write(decision_text(lines) or nothing)
    return 0 if all(line.replayed for line in lines) else 1


def _plan(options: argparse.Namespace) -> int:
    from flows.cli.output import table, write
    from flows.cli.placement import assumption_rows, first_placement
    from tasks.config.run import load_config

    plan = first_placement(load_config(options.config, options.overrides))
    if options.json:
        write(plan.model_dump_json(indent=2))
        return 0
    write(f"{plan.decision.reason}\n")
    write(table(assumption_rows(plan.inputs)))
    write("\nNothing is measured yet: lengths and step times are assumed, and replaced after the first iteration.")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    from flows.cli.simulate import simulate

    return simulate(options)


def _server(options: argparse.Namespace) -> int:
    from flows.cli.output import write
    from flows.cli.server import serve

    write(f"Prefect UI at http://127.0.0.1:{options.port} (stop with Ctrl-C)")
    serve(options.port)
    return 0


def _engine(options: argparse.Namespace) -> int:
    from flows.cli.engines import ACTIONS

    _log_progress(to=sys.stderr)
    return ACTIONS[options.action](options)


def _log_progress(*, to: TextIO) -> None:
    """Show the reports of tasks, and warnings of every room, as plain lines."""
    handler = logging.StreamHandler(to)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for room in ("flows", "tasks", "models", "placement", "infra"):
        logger = logging.getLogger(room)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "version": _version,
    "train": _train,
    "sft": _part,
    "dpo": _part,
    "reward-model": _part,
    "runs": _runs,
    "show": _show,
    "rollouts": _rollouts,
    "export": _export,
    "export-policy": _export_policy,
    "verify": _verify,
    "rescore": _rescore,
    "recredit": _recredit,
    "evaluate": _evaluate,
    "placement": _placement,
    "plan": _plan,
    "simulate": _simulate,
    "server": _server,
    "engine": _engine,
}


if __name__ == "__main__":
    sys.exit(main())
