"""Unit tests as a verifier: the last code block of a completion is run in a sandbox against the problem's tests.

The completion decides what it earns: no code, an exception, too much time or memory are tests not passed. Only what is
not its doing, a sandbox that fails or tests that cannot be read, leaves its score missing. Torch-free.
"""

import ast
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter, ValidationError

from infra.processes.programs import Program, Programs, SandboxFailed
from models.config.reward_terms import CodeReward
from models.config.rewards import ScoringConfig
from models.judges.verdicts import Judgement
from models.rewards.evaluate import Case
from models.text.steps import last_code

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
"""Runs a solution, then statement after statement, and tells those that raise nothing, with a key that it was given."""


@dataclass(frozen=True, slots=True)
class Statements:
    """Python to be run after a solution, in order."""

    sources: tuple[tuple[str, bool], ...]
    """Each with whether it is a test, which has to raise nothing; others only prepare tests."""


@dataclass(frozen=True, slots=True)
class InputOutput:
    """What a solution reads, and what it has to write then."""

    input: str
    output: str


_PAIRS: Final = TypeAdapter(tuple[InputOutput, ...])
Tests = Statements | tuple[InputOutput, ...]


def read_tests(answer: str) -> Tests:
    """Read the tests of a problem: a JSON list of `{"input", "output"}`, or Python.

    Each `assert` that stands by itself is a test; where there is none, all of the text is one. Raises ValueError.

    >>> read_tests('assert f(1) == 2').sources
    (('assert f(1) == 2', True),)
    >>> read_tests('[{"input": "1", "output": "2"}]')
    (InputOutput(input='1', output='2'),)
    """
    if answer.lstrip().startswith(("[", "{")):
        try:
            pairs = _PAIRS.validate_json(answer)
        except ValidationError as error:
            raise ValueError(f'expected a JSON list of {{"input", "output"}} as tests, found {answer!r:.60}') from error
        if not pairs:
            raise ValueError("expected tests, found an empty list")
        return pairs
    try:
        body = ast.parse(answer).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"expected Python or a JSON list as tests, found {answer!r:.60}: {error}") from error
    if not body:
        raise ValueError("expected tests, found none")
    if not any(isinstance(statement, ast.Assert) for statement in body):
        return Statements(((answer, True),))
    return Statements(tuple((ast.unparse(each), isinstance(each, ast.Assert)) for each in body))


class CodeJudge:
    """Judges completions by the tests of their problems; has a sandbox for each of its rewards."""

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
        """Completions judged so far; another thread may read it."""

    def start(self) -> None:
        """Start the sandboxes. Raises BadInput if they cannot be had."""
        for _, programs in self._judges.values():
            programs.start()

    def close(self) -> None:
        """Kill the sandboxes."""
        for _, programs in self._judges.values():
            programs.close()

    def judge(self, cases: Sequence[Case]) -> dict[str, list[Judgement]]:
        """Judge completions in order, by term. Raises WorkerLost where others kill the sandbox time after time."""
        return {
            term: [self._judgement(reward, programs, case) for case in cases]
            for term, (reward, programs) in self._judges.items()
        }

    def _judgement(self, reward: CodeReward, programs: Programs, case: Case) -> Judgement:
        try:
            passed = [*_passed(programs, last_code(case.completion), read_tests(case.answer), value=reward.value)]
        except (ValueError, SandboxFailed) as error:
            return Judgement(None, str(error))
        self.done += 1
        return Judgement(float(all(passed)) if reward.value == "all" else sum(passed) / len(passed), None)


def check_code(scoring: ScoringConfig) -> None:
    """Raise BadInput if no sandbox can be had for rewards that need one."""
    judge = CodeJudge(scoring)
    try:
        judge.start()
    finally:
        judge.close()


def _passed(programs: Programs, code: str | None, tests: Tests, *, value: str) -> Iterator[bool]:
    """Say of each test whether code passes it; what has been too slow for one is asked no other."""
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
    """Run all statements in one process; the key keeps code that only ends it from having passed anything."""
    key = secrets.token_hex(16)
    told = json.dumps([key, tests.sources])
    ran = programs.run(Program(("-c", CHECKING), {SOLUTION: code}, input=told))
    lines = set(ran.output.splitlines())
    for number, (_, is_test) in enumerate(tests.sources):
        if is_test:
            yield f"{key} {number}" in lines


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
