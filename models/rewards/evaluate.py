"""Judge completions in a process of their own, which is killed when one takes too long.

Rewards run code that nobody vouches for, on text that a policy made up: they hang, raise and bring their process
down. Whatever one completion does, its own score goes missing with a reason, and its neighbours keep theirs.
"""

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import cast

from infra.errors import BadInput, WorkerFailed
from models.config.rewards import ScoringConfig
from models.rewards.values import Case, Value, build_valuer, value_of

START_SECONDS = 120.0
"""Longest time for the process to import its rewards; sympy on a busy machine takes about ten."""
_EXIT_SECONDS = 1.0  # between the end of a dying process's pipe and its exit code
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Verdict:
    """One raw value per rule, none where it is missing, and the first reason, as `term: why`."""

    values: tuple[Value | None, ...]
    error: str | None


class _Lost(Exception):
    """The process is gone in the middle of a completion."""

    def __init__(self, verdict: Verdict, *, died: bool) -> None:
        super().__init__(verdict.error)
        self.verdict = verdict
        self.died = died  # by itself; otherwise it was killed for the time it took


class Evaluator:
    """Owns the process; starts it when it is needed, and again whenever it is gone."""

    def __init__(self, scoring: ScoringConfig) -> None:
        self._scoring = scoring
        self._child: _Child | None = None
        self.done = 0
        """Completions judged so far; another thread may read it."""

    def evaluate(self, cases: Sequence[Case]) -> list[Verdict]:
        """Judge in order; takes at most `timeout_seconds` (and a restart) for each completion that misbehaves."""
        if not self._scoring.rules:
            return [Verdict((), None) for _ in cases]
        verdicts: list[Verdict] = []
        suspect = -1
        while (position := len(verdicts)) < len(cases):
            try:
                for verdict in self._started().judge(cases[position:]):
                    verdicts.append(verdict)
                    self.done += 1
            except _Lost as lost:
                self.close()
                position = len(verdicts)
                if lost.died and suspect != position:
                    # It may have died idle, or of the memory that earlier completions took: a fresh process tells.
                    suspect = position
                    continue
                verdicts.append(lost.verdict)
                self.done += 1
            except BaseException:
                self.close()  # values of this call may still come through the pipe; the next call must not read them
                raise
        return verdicts

    def close(self) -> None:
        """Kill the process and what it started, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _started(self) -> "_Child":
        if self._child is None:
            self._child = _Child(self._scoring)
        return self._child


class _Child:
    """A running process and the pipe to it."""

    def __init__(self, scoring: ScoringConfig) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit the locks of Ray's and Arrow's threads
        self.terms, self.timeout_seconds = scoring.rule_terms, scoring.timeout_seconds
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, name="rewards", args=(theirs, scoring, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            raise

    def judge(self, cases: Sequence[Case]) -> Iterator[Verdict]:
        """Yield a verdict per case; raise _Lost with the verdict on the case that cost the process."""
        # A process that died idle tears the pipe here; the first case then finds its end.
        with suppress(OSError):
            self.pipe.send(list(cases))
        for _ in cases:
            yield self._verdict(time.monotonic() + self.timeout_seconds)

    def kill(self) -> None:
        """Kill the process with the group it leads; once, since its id is free for others afterwards."""
        if self.pipe.closed:
            return
        self.pipe.close()
        assert self.process.pid, "group 0 would be our own"
        with suppress(ProcessLookupError):  # it does not lead a group yet
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def _await_ready(self) -> None:
        try:
            problem = self._receive(time.monotonic() + START_SECONDS)
        except TimeoutError:
            raise WorkerFailed(f"rewards {self.terms}: not imported after {START_SECONDS:g} s") from None
        except EOFError:
            raise WorkerFailed(f"rewards {self.terms}: while importing them, {self._end()}") from None
        if problem is not None:
            raise BadInput(cast(str, problem))

    def _verdict(self, deadline: float) -> Verdict:
        values: list[Value | None] = []
        errors: list[str] = []
        for position, term in enumerate(self.terms):
            try:
                value, error = cast(tuple[Value | None, str | None], self._receive(deadline))
            except (TimeoutError, EOFError) as lost:
                died = isinstance(lost, EOFError)
                errors.append(f"{term}: {self._end() if died else f'no value after {self.timeout_seconds:g} s'}")
                unknown = [None] * (len(self.terms) - position)
                raise _Lost(Verdict((*values, *unknown), errors[0]), died=died) from lost
            values.append(value)
            if error is not None:
                errors.append(f"{term}: {error}")
        return Verdict(tuple(values), errors[0] if errors else None)

    def _receive(self, deadline: float) -> object:
        # The end of the process is watched beside the pipe: what it started may hold the pipe's other end open.
        ready = wait([self.pipe, self.process.sentinel], max(0.0, deadline - time.monotonic()))
        if self.pipe in ready:
            try:
                return self.pipe.recv()
            except OSError as error:
                raise EOFError from error
        raise EOFError if ready else TimeoutError

    def _end(self) -> str:
        if not wait([self.process.sentinel], _EXIT_SECONDS):
            return "its process closed the pipe"
        self.kill()
        code = self.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}"


def _serve(pipe: Connection, scoring: ScoringConfig, parent: int) -> None:
    """Run in the child: report ready (none) or what is wrong with the rewards, then answer until the pipe ends."""
    _die_with(parent)
    os.setsid()  # own process group: what rewards start is killed with them, and Ctrl-C is the parent's affair
    try:
        rewards = [build_valuer(config) for config in scoring.rules]
    except BadInput as error:
        pipe.send(str(error))
        return
    pipe.send(None)
    with suppress(EOFError):
        while True:
            for case in cast(list[Case], pipe.recv()):
                for reward in rewards:
                    pipe.send(value_of(reward, case))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies; even a hung reward is no orphan."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
