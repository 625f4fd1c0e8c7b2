"""The `rheostat` command. Commands that only read load neither Prefect nor torch."""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from infra.errors import BadInput, RheostatError

DEFAULT_STORE = "./runs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Exit code 2 for what the user wrote, 1 for what went wrong, 130 for an interrupt."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except RheostatError as error:
        sys.stderr.write(f"rheostat: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, BadInput) else 1
    except KeyboardInterrupt:
        sys.stderr.write("rheostat: interrupted; the same command continues\n")
        return 130
    except BrokenPipeError:  # the reader of our output (`| head`) has seen enough
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rheostat", description="Retrain language models by reinforcement learning, as a durable batch pipeline."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".")
        added.set_defaults(command=command)
        return added

    def reader(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = add(name, command, text)
        added.add_argument("--store", default=DEFAULT_STORE, help="where runs lie (default: %(default)s)")
        added.add_argument("--json", action="store_true", help="print JSON")
        return added

    train = add("train", _train, "run the configured job, or continue it")
    train.add_argument("config", type=Path, help="TOML file")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted keys, such as update.learning_rate=1e-4"
    )
    train.add_argument("--run", help="name of the run (default: the configuration's)")
    train.add_argument("--store", help="where runs lie (default: the configuration's)")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    train.add_argument("--json", action="store_true", help="print the summary as JSON")

    reader("runs", _runs, "list the runs of a store")
    show = reader("show", _show, "show a run: iterations, metrics, digests, seconds per stage")
    show.add_argument("run")
    rollouts = reader("rollouts", _rollouts, "read a run's rollouts")
    rollouts.add_argument("run")
    rollouts.add_argument("--iteration", type=int, help="default: the last one")
    rollouts.add_argument("--sort", choices=["position", "reward", "length"], default="position")
    rollouts.add_argument("--limit", type=int, default=10, help="completions shown (default: %(default)s)")
    export = reader("export", _export, "copy a run's sealed iterations to Parquet")
    export.add_argument("run")
    verify = reader("verify", _verify, "check every digest and every invariant of a run")
    verify.add_argument("run")

    evaluate = add("evaluate", _evaluate, "measure a policy directory on held-out problems")
    evaluate.add_argument("policy", type=Path, help="model directory in Hugging Face format")
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys of the configuration")
    evaluate.add_argument("--config", type=Path, help="TOML file (default: that of the run the policy lies in)")
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    server = add("server", _server, "serve Prefect's API and UI on this machine")
    server.add_argument("--port", type=int, default=4200, help="port on loopback (default: %(default)s)")
    return parser


def _train(options: argparse.Namespace) -> int:
    from flows.config import load_config
    from flows.launcher import plan_run, train_here

    named = [f'name="{options.run}"'] if options.run is not None else []
    stored = [f'store="{options.store}"'] if options.store is not None else []
    config = load_config(options.config, [*options.overrides, *named, *stored])
    _log_progress(to=sys.stderr if options.json else sys.stdout)
    if options.dry_run:
        _write(plan_run(config))
        return 0
    summary = train_here(config)
    if options.json:
        _write(summary.model_dump_json(indent=2))
        return 0
    from tasks.reporting import accuracy_lines

    _write(f"\n{accuracy_lines(summary)}")
    _write(f"plot     {summary.plot}\nrun      {summary.path}\npolicy   {summary.policy}\ndigest   {summary.digest}")
    store = f" --store {config.store}" if config.store != DEFAULT_STORE else ""
    here = "rheostat" if Path(sys.argv[0]).parent == Path() else sys.argv[0]
    _write(
        f"next     {here} rollouts {config.name} --sort reward{store}    what the policy writes\n"
        f"         {here} show {config.name}{store}    every iteration\n"
        f"         {here} server    Prefect's UI at http://127.0.0.1:4200: flows, artifacts, logs\n"
        f"         {here} train {options.config} iterations={config.iterations + 8}    train on"
    )
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from flows.launcher import evaluate_here

    _log_progress(to=sys.stderr)
    accuracy = evaluate_here(options.policy, config_path=options.config, overrides=options.overrides)
    if options.json:
        _write(accuracy.model_dump_json(indent=2))
    else:
        interval = f"95% interval {accuracy.low:.3f} to {accuracy.high:.3f}"
        _write(f"held-out accuracy {accuracy.mean:.3f} ({interval}), {accuracy.problems} problems")
    return 0


def _runs(options: argparse.Namespace) -> int:
    from flows.reading import describe_runs

    rows = describe_runs(options.store)
    if options.json:
        _write(json.dumps(rows, indent=2))
    elif not rows:
        _write(f"no runs in {options.store}")
    else:
        _table(rows)
    return 0


def _show(options: argparse.Namespace) -> int:
    from flows.reading import describe_run, iteration_rows

    description = describe_run(options.store, options.run)
    if options.json:
        _write(description.model_dump_json(indent=2))
        return 0
    _write(f"run {description.name}, made {description.created}, fingerprint {description.fingerprint}")
    for accuracy in description.evaluations:
        _write(
            f"held-out accuracy after {accuracy.number:>4} iterations: {accuracy.mean:.3f} "
            f"({accuracy.low:.3f} to {accuracy.high:.3f})"
        )
    _table(iteration_rows(description))
    return 0


def _rollouts(options: argparse.Namespace) -> int:
    from flows.reading import read_rollouts

    samples = read_rollouts(
        options.store, options.run, iteration=options.iteration, order=options.sort, limit=options.limit
    )
    if options.json:
        _write(json.dumps([sample.model_dump() for sample in samples], indent=2, ensure_ascii=False))
        return 0
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    for sample in samples:
        reward = "missing" if sample.reward is None else f"{sample.reward:g}"
        _write(
            f"--- iteration {sample.iteration}, prompt {sample.prompt_id}, sample {sample.sample}, "
            f"reward {reward}, {sample.tokens} tokens, {sample.finish_reason}, answer {sample.answer}\n"
            f"{sample.prompt}{bold}{sample.completion}{plain}"
        )
    return 0


def _export(options: argparse.Namespace) -> int:
    from flows.reading import export_run

    paths = [str(path) for path in export_run(options.store, options.run)]
    _write(json.dumps(paths, indent=2) if options.json else "\n".join(paths) or "no sealed iteration to export")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from flows.reading import verify_run

    problems = verify_run(options.store, options.run)
    if options.json:
        _write(json.dumps({"run": options.run, "ok": not problems, "problems": problems}, indent=2))
    else:
        _write("\n".join(problems) or f"run {options.run}: every digest and every invariant holds")
    return 1 if problems else 0


def _server(options: argparse.Namespace) -> int:
    from flows.server import serve

    _write(f"Prefect UI at http://127.0.0.1:{options.port} (stop with Ctrl-C)")
    serve(options.port)
    return 0


def _log_progress(*, to: TextIO) -> None:
    """Show the reports of tasks, and warnings of every room, as plain lines."""
    handler = logging.StreamHandler(to)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for room in ("flows", "tasks", "models", "placement", "infra"):
        logger = logging.getLogger(room)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _table(rows: Sequence[dict[str, object]]) -> None:
    if not rows:
        return
    cells = [[str(value) for value in row.values()] for row in rows]
    names = list(rows[0])
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(names)]
    for row in [names, *cells]:
        _write("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
