"""Run the parts of a suite side by side, print a table of seconds and results, and resume after an interrupt.

`.ci/suites.toml` defines the suites. A suite has lanes, which run at the same time; the parts of a lane run one after
another. Results are kept in `build/SUITE/results.json` for the present commit and working tree: a second start runs
only the parts that have not passed yet. Each part has a log, `build/SUITE/PART.log`. In commands, `{seed}` stands for a
number that follows from the commit.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TAIL_LINES = {True: 3, False: 150}
"""Lines of a part's log that are printed when the part has passed, and when it has failed."""

GRACE_SECONDS = 30.0
"""Time that an interrupted part has to end its own processes."""

JOIN_SECONDS = 1.0
"""Longest wait of the main thread. A signal that arrives just before a wait is handled after the wait."""


def git(*arguments: str) -> str:
    """Return the output of a git command in this repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def describe_tree() -> str:
    """Return the commit, and a digest of what differs from it if anything does."""
    changes = git("diff", "HEAD")
    for name in git("ls-files", "-z", "--others", "--exclude-standard").split("\0")[:-1]:
        changes += f"{name} {git('hash-object', '--', name)}"
    return git("rev-parse", "HEAD").strip() + (hashlib.sha256(changes.encode()).hexdigest() if changes else "")


@dataclass
class Suite:
    """Parts that run, their results, and the processes that are running."""

    name: str
    lanes: list[list[str]]
    commands: dict[str, str]
    folder: Path
    tree: str
    results: dict[str, dict[str, object]] = field(default_factory=dict)
    """For each part that has ended: `passed`, `seconds`, and `last_line` of its log."""
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stopped: bool = False

    def load(self, *, fresh: bool) -> None:
        """Take over the results of parts that passed with the same tree. If `fresh`, the parts in lanes run again."""
        path = self.folder / "results.json"
        stored = json.loads(path.read_text()) if path.exists() else {}
        if stored.get("tree") == self.tree:
            repeated = {name for lane in self.lanes for name in lane} if fresh else ()
            passed = {name: result for name, result in stored["parts"].items() if result["passed"]}
            self.results = {name: result for name, result in passed.items() if name not in repeated}

    def save(self) -> None:
        """Write the results; a kill leaves either the old or the new file."""
        temporary = self.folder / "results.json.new"
        temporary.write_text(json.dumps({"tree": self.tree, "parts": self.results}, indent=1))
        temporary.replace(self.folder / "results.json")

    def run_lane(self, parts: list[str]) -> None:
        """Run the parts of one lane in order, also after one has failed."""
        for name in parts:
            if name in self.results:
                say(f"{name}: passed before, in {self.results[name]['seconds']:.0f} s")
            elif not self.is_stopped:
                self.run_part(name)

    def run_part(self, name: str) -> None:
        """Run one part in a separate process group and record its result."""
        log, began = self.folder / f"{name}.log", time.monotonic()
        with log.open("wb") as output:
            with self.lock:
                if self.is_stopped:
                    return
                say(f"{name}: {self.commands[name]}")
                process = subprocess.Popen(
                    ["bash", "-c", self.commands[name]],
                    cwd=ROOT,
                    env={key: value for key, value in os.environ.items() if key != "ARGS"},  # the part's own ones
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.running[name] = process
            code = process.wait()
        with self.lock:
            del self.running[name]
            if self.is_stopped:
                return
            lines = log.read_text(errors="replace").rstrip().splitlines()
            result = {"passed": code == 0, "seconds": time.monotonic() - began, "last_line": lines[-1] if lines else ""}
            self.results[name] = result
            self.save()
            tail = "\n".join(lines[-TAIL_LINES[code == 0] :])
            say(f"{name}: {'passed' if code == 0 else f'FAILED with code {code}'} in {result['seconds']:.0f} s\n{tail}")

    def stop(self) -> None:
        """Interrupt the running parts and kill those that do not end. Their results are not recorded."""
        with self.lock:
            self.is_stopped = True
            processes = list(self.running.values())
        for number, patience in ((signal.SIGINT, GRACE_SECONDS), (signal.SIGKILL, 0.0)):
            deadline = time.monotonic() + patience
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                time.sleep(0.1)

    def print_table(self, seconds: float) -> None:
        """Print the result and the seconds of every part."""
        names = [name for lane in self.lanes for name in lane]
        rows = []
        for name in names:
            result = self.results.get(name)
            state = "not run" if result is None else "passed" if result["passed"] else "FAILED"
            rows.append(
                (name, state, f"{result['seconds']:.0f}" if result else "", result["last_line"] if result else "")
            )
        width = max(map(len, names))
        say(f"\n{'part':{width}}  {'result':7}  {'seconds':>7}  last line of its log")
        for name, state, taken, line in rows:
            say(f"{name:{width}}  {state:7}  {taken:>7}  {line}")
        passed = sum(state == "passed" for _, state, *_ in rows)
        say(f"{self.name}: {passed} of {len(rows)} parts passed, {seconds:.0f} s; logs in {self.folder}")


def say(text: str) -> None:
    """Print a text at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read_suite(name: str, folder: Path, suites: dict[str, Any]) -> Suite:
    """Return a suite by its name, with `{seed}` replaced in its commands."""
    tree, lanes = describe_tree(), suites["suite"][name]["lanes"]
    seed = str(int(tree[:7], 16))
    commands = {part: suites["part"][part].replace("{seed}", seed) for lane in lanes for part in lane}
    return Suite(name, lanes, commands, folder, tree)


def main() -> int:
    """Run a suite; the exit code is 0 if every part passed, 1 if one failed, 130 after an interrupt."""
    suites = tomllib.loads((ROOT / ".ci/suites.toml").read_text())
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("suite", choices=suites["suite"], help="suite of .ci/suites.toml to run")
    parser.add_argument("--fresh", action="store_true", help="also run the parts that have passed before")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run only these parts of the suite")
    options = parser.parse_args()
    began, folder = time.monotonic(), ROOT / "build" / options.suite
    folder.mkdir(parents=True, exist_ok=True)
    suite = read_suite(options.suite, folder, suites)
    if unknown := [part for part in options.only or () if part not in suite.commands]:
        parser.error(f"unknown part {unknown[0]!r}: expected {', '.join(suite.commands)}")
    if options.only:
        suite.lanes = [[part for part in lane if part in options.only] for lane in suite.lanes]
    suite.load(fresh=options.fresh)

    def interrupt(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=suite.stop).start()  # a handler must not wait for the lock of the thread it interrupts

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    lanes = [threading.Thread(target=suite.run_lane, args=(parts,)) for parts in suite.lanes]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        while lane.is_alive():
            lane.join(JOIN_SECONDS)
    suite.print_table(time.monotonic() - began)
    if suite.is_stopped:
        say("interrupted: the same command goes on with the parts that have not passed")
        return 130
    return int(not all(result["passed"] for result in suite.results.values()))


if __name__ == "__main__":
    sys.exit(main())
