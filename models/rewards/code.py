"""Unit tests as a reward: the last code block of a completion is run in a sandbox against the tests of the problem.

A test has failed if the code is missing, raises an exception, or needs too much time or memory. A score is missing only
for reasons outside the completion: if the sandbox fails or the tests cannot be parsed. Torch-free.
"""

import ast
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from rheostat.infra.plain_values import shorten_feedback
from rheostat.infra.processes.programs import Program, Programs, SandboxFailed
from rheostat.infra.syntax import parse_source
from rheostat.models.config.reward_terms import CodeReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.judges.verdicts import Judgement
from rheostat.models.rewards.evaluate import Case
from rheostat.models.text.steps import find_last_code

SOLUTION: Final = "solution.py"
CHECKING: Final = """
import json, os, sys, types

def check():
    key, statements = json.load(sys.stdin)
    report, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    solution = sys.modules["solution"] = types.ModuleType("solution")
    source = open("solution.py", encoding="utf-8").read()
    exec(compile(source, "solution.py", "exec"), solution.__dict__)
    for number, (source, counts) in enumerate(statements):
        try:
            exec(compile(source, "tests", "exec"), solution.__dict__)
        except BaseException:
            if not counts:
                return
        else:
            os.write(report, f"{key} {number}\\n".encode())

check()
"""
"""Program that runs a solution and then each test statement. It reports which statements passed, together with a secret
key. The solution does not know the key, so it cannot fake a report."""
REPEATING: Final = """
import json, sys, types

statements, solution = json.load(sys.stdin), types.ModuleType("solution")
sys.modules["solution"] = solution
for name, source in [("solution.py", open("solution.py", encoding="utf-8").read()), *statements]:
    exec(compile(source, name, "exec"), solution.__dict__)
"""
"""Program that runs a solution and then test statements, and shows the exception of the first one that fails."""
MAX_SHOWN: Final = 800
"""Maximum number of characters of a test, of its expected output and of its output in a feedback."""


@dataclass(frozen=True, slots=True)
class Statements:
    """Python tests of a problem: statements that are run in order after the solution."""

    sources: tuple[tuple[str, bool], ...]
    """Source of each statement, and whether the statement is a test. A test passes if it raises no exception. Other
    statements only prepare the tests."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """Input-output test of a problem: a text for the solution's stdin, and the expected output."""

    input: str
    output: str


_PAIRS: Final = TypeAdapter(tuple[InputOutput, ...])
Tests = Statements | tuple[InputOutput, ...]


def read_tests(answer: str) -> Tests:
    """Parse the tests of a problem: a JSON list of `{"input", "output"}`, or Python code.

    Each top-level `assert` statement is a test. Python code without such a statement is a single test. Raises
    ValueError if the text has no tests or is neither JSON nor Python.

    >>> read_tests('assert f(1) == 2').sources
    (('assert f(1) == 2', True),)
    >>> read_tests('[{"input": "1", "output": "2"}]')
    (InputOutput(input='1', output='2'),)
    """
    if answer.lstrip().startswith(("[", "{")):
        try:
            pairs = _PAIRS.validate_json(answer)
        except ValidationError as error:
            raise ValueError(
                'the reference answer must contain tests, either Python code or a JSON list of {"input", "output"}, '
                f"but this JSON is not such a list: {answer!r:.60}"
            ) from error
        if not pairs:
            raise ValueError("the reference answer must contain tests, but it is an empty list")
        return pairs
    try:
        body = parse_source(answer).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(
            'the reference answer must contain tests, either Python code or a JSON list of {"input", "output"}, but '
            f"it is neither ({error}): {answer!r:.60}"
        ) from error
    if not body:
        raise ValueError("the reference answer must contain tests, but it contains no Python statement")
    if not any(isinstance(statement, ast.Assert) for statement in body):
        return Statements(((answer, True),))
    return Statements(tuple((ast.unparse(each), isinstance(each, ast.Assert)) for each in body))


class CodeJudge:
    """Runner of the tests of all code rewards. Each code reward has a separate sandbox."""

    def __init__(self, scoring: ScoringConfig) -> None:
        self._judges = {
            term: (
                reward,
                Programs(
                    reward.python,
                    where=f"reward {term!r} of kind 'code'",
                    seconds=reward.test_seconds,
                    memory_bytes=reward.memory_mib << 20,
                ),
            )
            for term, reward in scoring.code_rewards.items()
        }
        self.done = 0
        """Number of completions judged so far. Another thread may read it."""

    def start(self) -> None:
        """Start the sandboxes. Raises BadInput if a sandbox is not available."""
        for _, programs in self._judges.values():
            programs.start()

    def close(self) -> None:
        """Kill the sandboxes and the programs in them."""
        for _, programs in self._judges.values():
            programs.close()

    def judge(self, cases: Sequence[Case]) -> dict[str, list[Judgement]]:
        """Run the tests on completions in order. Returns the scores of the completions for each reward term. Raises
        WorkerLost if a sandbox is repeatedly killed from outside."""
        return {
            term: [self._judgement(reward, programs, case) for case in cases]
            for term, (reward, programs) in self._judges.items()
        }

    def _judgement(self, reward: CodeReward, programs: Programs, case: Case) -> Judgement:
        """Run the tests on one completion and return its score. As configured, the score is 1 only if all tests pass,
        or the share of passed tests."""
        try:
            code, tests = find_last_code(case.completion), read_tests(case.answer)
            passed = [*_passed(programs, code, tests, value=reward.value)]
        except (ValueError, SandboxFailed) as error:
            return Judgement(None, str(error))
        self.done += 1
        value, feedback = float(all(passed)) if reward.value == "all" else sum(passed) / len(passed), ""
        if reward.feedback and not all(passed):
            with suppress(SandboxFailed):
                feedback = _explain_failure(programs, code, tests, passed.index(False))
        return Judgement(value, None, feedback=feedback)


def check_code(scoring: ScoringConfig) -> None:
    """Raise BadInput if a code reward is configured but no sandbox is available."""
    judge = CodeJudge(scoring)
    try:
        judge.start()
    finally:
        judge.close()


def _passed(programs: Programs, code: str | None, tests: Tests, *, value: str) -> Iterator[bool]:
    """Run the tests on the code, and yield for each test whether it passed. If `code` is None, yield False once.

    After a test that runs too long, the remaining tests count as failed. With `value="all"`, input-output tests stop at
    the first failure.
    """
    if code is None:
        yield False
    elif isinstance(tests, Statements):
        yield from _asserted(programs, code, tests)
    else:
        late = False
        for pair in tests:
            ran = None if late else programs.run(Program((SOLUTION,), {SOLUTION: code}, input=pair.input))
            late = ran is None or ran.is_late
            passes = ran is not None and not ran.ending and _lines(ran.output) == _lines(pair.output)
            yield passes
            if not passes and value == "all":
                return


def _asserted(programs: Programs, code: str, tests: Statements) -> Iterator[bool]:
    """Run the solution and all test statements in one process, and yield for each test whether it passed.

    The process must report its results with a secret key, so a solution that only exits the process does not pass.
    """
    key = secrets.token_hex(16)
    stdin = json.dumps([key, tests.sources])
    ran = programs.run(Program(("-c", CHECKING), {SOLUTION: code}, input=stdin))
    lines = set(ran.output.splitlines())
    for number, (_, is_test) in enumerate(tests.sources):
        if is_test:
            yield f"{key} {number}" in lines


def _explain_failure(programs: Programs, code: str | None, tests: Tests, failed: int) -> str:
    """Run the test with the index `failed` again, and return a feedback that shows the test, its expected output, and
    the output and errors of the program. A program that is too slow was stopped at a random place, so its output is not
    shown. The feedback is empty if the test passes this time."""
    if code is None:
        return "The answer contains no code block."
    files = {SOLUTION: code}
    if isinstance(tests, Statements):
        place = [number for number, (_, is_test) in enumerate(tests.sources) if is_test][failed]
        statements = [("test", source) for source, _ in tests.sources[: place + 1]]
        program = Program(("-c", REPEATING), files, input=json.dumps(statements), shows_errors=True)
        shown = {"This test failed": statements[-1][1]}
    else:
        program = Program((SOLUTION,), files, input=tests[failed].input, shows_errors=True)
        shown = {"A test failed. Input": tests[failed].input, "Expected output": tests[failed].output}
    ran = programs.run(program)
    if not isinstance(tests, Statements) and not ran.ending and _lines(ran.output) == _lines(tests[failed].output):
        return ""
    # The same inputs must give the same feedback, but addresses of objects differ.
    output = re.sub(r"\b0x[0-9a-f]{6,}", "0x…", ran.output)
    shown |= {"Error": ran.ending} if ran.is_late else {"Output": output, "Error": ran.ending}
    parts = [f"{name}:\n{_shorten(text.strip())}" for name, text in shown.items() if text.strip() or name != "Error"]
    return shorten_feedback("\n".join(parts))


def _shorten(text: str) -> str:
    """Return a text without its middle if it has more than `MAX_SHOWN` characters."""
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}…{text[-half + 1 :]}"


def _lines(text: str) -> list[str]:
    """Return the lines of an output for comparison, without trailing white space in each line and without empty lines
    at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
