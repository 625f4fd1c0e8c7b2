"""Measure the strength of the default test suite by mutation testing.

Draw a sample of mutants once. A mutant is one small change of the code, made by an operator of cosmic-ray:

    python -m bench.mutants --tree DIR --mutants FILE --draw 300 --seed 20260

Then run the sample against the tests of a tree, which is the root of any checkout:

    python -m bench.mutants --tree DIR --mutants FILE --results FILE

The file of mutants does not depend on the tests, so one sample can be run before and after a change of the tests.
The first run on a tree executes the default suite to record which tests execute which lines, in a file next to the
results. An interrupted run resumes if it is started again. Drawing needs cosmic-ray, and recording needs coverage.
"""

import argparse
import ast
import difflib
import gc
import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import psutil
import pytest

PACKAGES = ("models/algorithms", "models/objectives", "models/credit", "infra/store", "tasks/promotion")
FOLDERS = ("tests/unit", "tests/integration/[a-z]*", "tests/runs")
LIBRARIES = (
    *("torch", "numpy", "scipy.stats", "pyarrow.parquet", "pydantic", "hypothesis", "transformers", "peft", "duckdb"),
    *("prefect", "prefect.main", "fastapi", "httpx", "rich.console", "cyclopts", "math_verify", "matplotlib.pyplot"),
    *("obstore", "tenacity", "xdist.scheduler", "PIL.Image"),
)
"""Third-party modules that are imported once, so that the process forked for each mutant need not import them."""

BINARY_EXPRESSIONS = {"arith_expr", "term", "expr", "and_expr", "xor_expr", "shift_expr", "power"}
"""Types of Parso nodes in which `*`, `**` and `/` are operators. In other nodes they mark arguments."""

ROUNDS = ((20, 8.0, 3), (60, 15.0, 8))
"""Maximum tests, seconds and test modules in each round of tests. Mutants that no test kills enter the next round."""


def draw(tree, count, seed):
    """Return the number of possible mutants, and a random sample of `count` mutants that change the syntax tree."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    provider, mutants = OperatorProvider(), []
    candidates = [candidate for file in _product_files(tree) for candidate in _candidates(file, tree, provider)]
    for file, name, occurrence in random.Random(seed).sample(candidates, len(candidates)):
        source = (tree / file).read_text()
        mutated = mutate_code(source, provider[name](), occurrence)
        with suppress(SyntaxError):
            if ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)):
                mutants.append({"id": len(mutants), "file": file, "operator": name, **_change(source, mutated)})
        if len(mutants) == count:
            break
    return len(candidates), mutants


def _product_files(tree):
    return sorted(str(path.relative_to(tree)) for package in PACKAGES for path in (tree / package).glob("*.py"))


def _candidates(file, tree, provider):
    """Yield the file, operator and occurrence of every possible mutation of a file, except those in type hints."""
    from cosmic_ray.ast import ast_nodes, get_ast

    source = (tree / file).read_text()
    nodes, hints = list(ast_nodes(get_ast(source))), list(_type_hints(ast.parse(source)))
    for name in provider:
        if provider[name].arguments():  # the operators that need names of variables
            continue
        operator = provider[name]()
        places = [(node, start) for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (node, start) in enumerate(places):
            is_argument = name.startswith("ReplaceBinary") and node.parent.type not in BINARY_EXPRESSIONS
            if not is_argument and not any(first <= start < last for first, last in hints):
                yield file, name, occurrence


def _type_hints(module):
    """Yield the source ranges of annotations, of type aliases that use `|`, and of `if TYPE_CHECKING` blocks."""
    for node in ast.walk(module):
        hints = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.Assign) and node in module.body and isinstance(node.value, ast.BinOp):
            hints += [node.value] if isinstance(node.value.op, ast.BitOr) else []
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            hints.append(node)
        for hint in filter(None, hints):
            yield (hint.lineno, hint.col_offset), (hint.end_lineno, hint.end_col_offset)


def _change(source, mutated):
    """Return the lines that a mutation changes, before and after, with the first line's number and a diff."""
    before, after = source.splitlines(keepends=True), mutated.splitlines(keepends=True)
    changes = [c for c in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if c[0] != "equal"]
    old, new = before[changes[0][1] : changes[-1][2]], after[changes[0][3] : changes[-1][4]]
    diff = "".join([*("-" + line for line in old), *("+" + line for line in new)])
    return {"line": changes[0][1] + 1, "before": "".join(old), "after": "".join(new), "diff": diff}


class _Recorder:
    """Pytest plugin that records the executed lines and the seconds of each test and of each shared fixture."""

    def __init__(self, tracer):
        self.tracer, self.context, self.since = tracer, "", time.monotonic()
        self.seconds, self.fixtures, self.passed, self.failed = Counter(), {}, set(), set()

    @contextmanager
    def _recording(self, context):
        outer = self.context
        self._switch(context)
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, context):
        now = time.monotonic()
        self.seconds[self.context] += now - self.since
        self.context, self.since = context, now
        self.tracer.switch_context(context)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        definitions = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values() if found]
        self.fixtures[item.nodeid] = [_fixture_name(d) for d in definitions if d.scope != "function"]
        with self._recording(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        with self._recording(self.context if fixturedef.scope == "function" else _fixture_name(fixturedef)):
            return (yield)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


def _fixture_name(definition):
    return f"fixture {definition.baseid}::{definition.argname}"


def record(tree, folder, options):
    """Run the tests of a folder in this process. Return the lines that each passing test executes, and its seconds."""
    import coverage

    with tempfile.TemporaryDirectory() as scratch:
        include = [str(tree / package / "*") for package in PACKAGES]
        tracer = coverage.Coverage(data_file=f"{scratch}/lines", include=include, config_file=False)
        recorder = _Recorder(tracer)
        tracer.start()
        pytest.main([*options, folder], plugins=[recorder])
        tracer.stop()
        tests, users, lines = sorted(recorder.passed - recorder.failed), defaultdict(list), {}
        for number, test in enumerate(tests):
            for context in (test, *recorder.fixtures[test]):
                users[context].append(number)
        for file in _product_files(tree):
            contexts = tracer.get_data().contexts_by_lineno(str(tree / file))
            lines[file] = {line: sorted({t for name in names for t in users[name]}) for line, names in contexts.items()}
    fixtures, failed = {test: recorder.fixtures[test] for test in tests}, sorted(recorder.failed)
    share = min(1.0, sum(os.times()[:4]) / sum(recorder.seconds.values()))  # of a core, since others may use it too
    seconds = {name: round(share * spent, 4) for name, spent in recorder.seconds.items()}
    return {"tests": tests, "failed": failed, "fixtures": fixtures, "seconds": seconds, "lines": lines}


def load_suite(tree, patterns, stored, log):
    """Return the recorded lines and seconds of the tests. Record the folders that the file `stored` lacks."""
    parts = json.loads(stored.read_text()) if stored.exists() else {}
    paths = [path for pattern in patterns for path in sorted(tree.glob(pattern)) if path.is_dir()]
    suite = {"tests": [], "fixtures": {}, "seconds": {}, "lines": defaultdict(lambda: defaultdict(list))}
    for folder in [str(path.relative_to(tree)) for path in paths]:
        if folder not in parts:
            parts[folder] = in_fork(tree, log, 5 * 3600, record, tree, folder)
            stored.write_text(json.dumps(parts))
        for file, lines in parts[folder]["lines"].items():
            for line, tests in lines.items():
                suite["lines"][file][int(line)] += [len(suite["tests"]) + number for number in tests]
        suite["tests"] += parts[folder]["tests"]
        suite["fixtures"].update(parts[folder]["fixtures"])
        suite["seconds"].update(parts[folder]["seconds"])
    return suite


def rank(mutant, suite, tree):
    """Return the tests that execute the mutated line. Tests that import the mutated module come first, then quick ones.

    If the mutated line runs at import, return the tests that execute a line with the first name of the mutated line.
    """
    path = Path(mutant["file"])
    package, code, lines = ".".join(path.parent.parts), (tree / path).read_text(), suite["lines"][mutant["file"]]
    functions = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    if any(function.body[0].lineno <= mutant["line"] <= function.end_lineno for function in functions):
        executed = [line for line, tests in lines.items() if tests and line <= mutant["line"]]
        reached = {max(executed, default=0)}  # a long statement is recorded at some of its lines
    else:
        name = re.search(r"^\s*(?:async )?(?:def |class )?@?(\w+)|$", mutant["before"], re.MULTILINE)[1]
        using = re.compile(rf"\b{name}\b")
        reached = {
            number for number, line in enumerate(code.splitlines(), 1) if using.search(line) and lines.get(number)
        }
    numbers = {number for line in reached or lines for number in lines.get(line, ())}
    near = re.compile(rf"\b{package}\.{path.stem}\b|from {package} import .*\b{path.stem}\b")
    tests = [suite["tests"][number] for number in numbers]
    is_near = {module: bool(near.search((tree / module).read_text())) for module in {_module(test) for test in tests}}
    return sorted(tests, key=lambda test: (not is_near[_module(test)], _seconds([test], suite), test))


def _module(test):
    return test.split("::")[0]


def _seconds(tests, suite):
    """Return the total seconds of tests and of the fixtures that they share, as recorded in `suite`."""
    names = {*tests, *(name for test in tests for name in suite["fixtures"][test])}
    return sum(suite["seconds"].get(name, 0.0) for name in names)


def choose(ranked, suite, max_tests, max_seconds, max_modules):
    """Return the first tests of a ranking that stay within the limits. Tests of the same module are consecutive."""
    chosen, names, seconds = defaultdict(list), set(), 0.0
    for test in ranked[: 10 * max_tests]:
        added = {test, *suite["fixtures"][test]} - names
        cost = sum(suite["seconds"].get(name, 0.0) for name in added)
        is_allowed = _module(test) in chosen or len(chosen) < max_modules
        if is_allowed and seconds + cost <= max_seconds and sum(map(len, chosen.values())) < max_tests:
            chosen[_module(test)].append(test)
            names, seconds = names | added, seconds + cost
    return [test for tests in chosen.values() for test in tests]


class _Failures:
    """Pytest plugin that collects the names of failed tests and of test modules that cannot be imported."""

    def __init__(self):
        self.names = []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.names.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tests, options):
    """Run tests in this process. Return pytest's exit code and the names of the tests that failed."""
    failures = _Failures()
    code = pytest.main([*options, *tests], plugins=[failures])
    return {"code": int(code), "failed": failures.names}


def in_fork(tree, log, seconds, function, *arguments):
    """Call `function` in a forked process that imports the project from `tree` and logs to `log`. Return its result.

    Return None if the process uses more CPU seconds than `seconds`, or lasts five times as long.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
                os.dup2(1, 2)
                os.chdir(tree)
                sys.path[0], sys.argv = str(tree), ["pytest"]
                sys.modules.pop("bench")
                sys.modules["__main__"] = types.ModuleType("__main__")  # processes that tests start do not import it
                importlib.invalidate_caches()
                options = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
                result.write_text(json.dumps(function(*arguments, options)))
            finally:
                os._exit(0)
        process, deadline = psutil.Process(pid), time.monotonic() + 5 * seconds
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline or sum(process.cpu_times()[:2]) > seconds:
                for child in [*process.children(recursive=True), process]:
                    with suppress(psutil.NoSuchProcess):
                        child.kill()
                os.waitpid(pid, 0)
                return None
            time.sleep(0.05)
        return json.loads(result.read_text()) if result.exists() else {"code": -1, "failed": []}


@contextmanager
def apply_mutant(mutant, tree):
    """Write a mutant to its source file, and restore the file after the block. Yields the mutant with its line."""
    path = tree / mutant["file"]
    source, times = path.read_text(), path.stat()
    places = [match.start() for match in re.finditer(rf"^{re.escape(mutant['before'])}", source, re.MULTILINE)]
    lines = {source.count("\n", 0, place) + 1: place for place in places}
    if not lines:
        raise SystemExit(f"{mutant['file']} no longer contains mutant {mutant['id']}:\n{mutant['before']}")
    line = min(lines, key=lambda number: abs(number - mutant["line"]))
    path.write_text(source[: lines[line]] + mutant["after"] + source[lines[line] + len(mutant["before"]) :])
    os.utime(path, (times.st_atime, time.time() + mutant["id"]))  # never the time in a compiled file
    try:
        yield {**mutant, "line": line}
    finally:
        path.write_text(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def run_mutant(mutant, ranked, suite, tree, log):
    """Run the tests that reach a mutant, in rounds, until one fails. Return the result: killed, survived or timeout."""
    began, tried = time.monotonic(), []
    row = {name: mutant[name] for name in ("id", "file", "line", "operator", "diff")}
    row.update(status="survived", killed_by=None)
    for limits in ROUNDS:
        tests = choose([test for test in ranked if test not in tried], suite, *limits)
        if not tests or row["status"] != "survived":
            continue
        result = in_fork(tree, log, 30 + 3 * _seconds(tests, suite), run_tests, ["-x", *tests])
        tried += tests
        if result is None:
            row.update(status="timeout")
        elif result["code"] != 0:
            row.update(status="killed", killed_by=[*result["failed"], f"exit code {result['code']}"][0])
    return {**row, "tests": len(tried), "seconds": round(time.monotonic() - began, 1)}


def main(arguments=None):
    """Write a sample of mutants (`--draw`), or test each mutant and print how many were killed by the test suite."""
    options = _parser().parse_args(arguments)
    tree, rows = options.tree.resolve(), []
    if options.draw:
        count, mutants = draw(tree, options.draw, options.seed)
        document = {"seed": options.seed, "candidates": count, "packages": PACKAGES, "mutants": mutants}
        options.mutants.write_text(json.dumps(document, indent=1) + "\n")
        return
    subprocess.run(["git", "diff", "--exit-code", "--stat", "--", *PACKAGES], cwd=tree, check=True)
    os.environ.update(CI="1", OMP_NUM_THREADS="1", PYTHONPATH=str(tree))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # restores the mutated file
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    log = options.results.with_suffix(".log")
    suite = load_suite(tree, options.tests or FOLDERS, options.results.with_suffix(".map.json"), log)
    os.environ["PYTHONDONTWRITEBYTECODE"], sys.dont_write_bytecode = "1", True
    mutants = json.loads(options.mutants.read_text())["mutants"][: options.limit]
    if options.only_killed_in:
        killed = {row["id"] for row in _rows(options.only_killed_in) if row["status"] != "survived"}
        mutants = [mutant for mutant in mutants if mutant["id"] in killed]
    rows = [row for row in _rows(options.results) if row["killed_by"] not in options.exclude]
    for mutant in mutants:
        if mutant["id"] in {row["id"] for row in rows}:
            continue
        with nullcontext(mutant) if options.unmutated else apply_mutant(mutant, tree) as placed:
            ranked = [test for test in rank(placed, suite, tree) if test not in options.exclude]
            rows.append(run_mutant(placed, ranked, suite, tree, log))
        options.results.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sys.stderr.write("{id} {file}:{line} {operator} {status} {killed_by} {seconds} s\n".format(**rows[-1]))
    killers = sorted({row["killed_by"] for row in rows if "::" in (row["killed_by"] or "")})
    for name in in_fork(tree, log, 3600, run_tests, killers)["failed"]:
        sys.stdout.write(f"{name} fails without a mutant. Run again with --exclude '{name}'.\n")
    counts = Counter(row["status"] for row in rows)
    survived, timeouts = counts["survived"], counts["timeout"]
    sys.stdout.write(f"killed {counts['killed']} of {len(rows)} ({survived} survived, {timeouts} timed out)\n")


def _rows(results):
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description="Run mutation tests of the suite.")
    parser.add_argument("--tree", type=Path, required=True, help="root of the checkout with code and tests")
    parser.add_argument("--mutants", type=Path, required=True, help="file of the sample")
    parser.add_argument("--draw", type=int, metavar="COUNT", help="write a new sample of this size and exit")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--results", type=Path, help="file of the results, one JSON object per line")
    parser.add_argument("--only-killed-in", type=Path, metavar="RESULTS", help="run only mutants killed there")
    parser.add_argument("--tests", action="append", metavar="FOLDER", help="use only the tests of this folder")
    parser.add_argument("--exclude", action="append", default=[], metavar="TEST", help="do not run this test")
    parser.add_argument("--limit", type=int, metavar="COUNT", help="run only the first mutants of the sample")
    parser.add_argument("--unmutated", action="store_true", help="run the selected tests on unchanged code, as a check")
    return parser


if __name__ == "__main__":
    main()
