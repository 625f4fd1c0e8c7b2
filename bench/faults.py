"""Cost of faults: `make faults` writes docs/faults.md again from disturbed runs.

A small run is disturbed at the write of every kind of file, in real processes, and in a tenth of all work units. Each
time the same command is repeated until it succeeds. The result is compared with the undisturbed run by a checker that
shares no code with the product.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from math import ceil
from pathlib import Path

import pyarrow as pa

from rheostat.infra.processes.watch import END_SECONDS
from tests.support import checker
from tests.support.chaos import Strike, begun_again, problems_after, run_once, writes_of
from tests.support.interruptions import SIGNALS, STATES, interrupt
from tests.support.jobs import Fault, Job, leftovers_of, manifests_of, prefect_server, shards_of

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "faults.md"
MEASURED = HOME / "build" / "faults.json"
"""File in which results are saved, so that an interrupted benchmark continues.

Without it, everything is measured again.
"""

KILLS: tuple[tuple[str, Callable[[str], Strike]], ...] = (
    ("SIGKILL before the write", partial(Strike, moment="before")),
    ("SIGKILL with half of the file written", partial(Strike, moment="during")),
    ("SIGKILL after the write", partial(Strike, moment="after")),
)
STRIKES = (*KILLS, ("disk full with half of the file written", partial(Strike, moment="during", full=True)))

PROCESSES: dict[str, tuple[list[Fault], tuple[str, ...]]] = {
    "rollout worker, killed while it generates a shard, and before, during and after the write of a shard": (
        [
            Fault("rollout", "progress", "generate", count=5),
            Fault("rollout", "before", "/shards/", count=2),
            Fault("rollout", "during", "/shards/", count=2),
            Fault("rollout", "after", "/shards/"),
        ],
        (),
    ),
    "scoring worker, killed before, during and after the write of scores": (
        [
            Fault("scoring", "before", "/shards/"),
            Fault("scoring", "during", "/shards/", count=3),
            Fault("scoring", "after", "/shards/", count=2),
        ],
        (),
    ),
    "update rank, killed during a step, and at the write of weights, optimizer state and bundle.json": (
        [
            Fault("update-0", "progress", "update"),
            Fault("update-0", "before", "/policies/.*/model.safetensors", count=2),
            Fault("update-0", "during", "/states/"),
            Fault("update-0", "after", "/policies/.*/bundle.json"),
        ],
        (),
    ),
    "rollout worker, stopped (SIGSTOP) permanently": (
        [Fault("rollout", "progress", "generate", count=5, signal=signal.SIGSTOP)],
        ("pools.stall_seconds=15",),
    ),
    "driver, killed at a commit of rollouts, and again at a commit of the update": (
        [
            Fault("driver", "after", "/manifests/it-0001/rollout/"),
            Fault("driver", "before", "/manifests/it-0002/update.json"),
        ],
        (),
    ),
}

PROMPTS = {"train": "training prompts", "heldout": "held-out prompts"}
"""Names of the prompt splits as they appear in the documentation page."""

SHARE_JOB = (
    "iterations=3",
    "rollout.prompts=24",
    "rollout.group_size=2",
    "rollout.shard_prompts=2",
    'rollout.engine={kind="target",target="bench.paced:PacedEngine",options={base_seconds=0.2,median_tokens=40}}',
    "evaluation.problems=2",
)
FAILED_SHARE = 0.1
STAGES = {
    "generate": ("rollout", "progress", 3),
    "score": ("scoring", "begin", 1),
    "update": ("update-0", "progress", 1),
}
"""Fault to inject for each method of a worker: the role, the moment, and the occurrence of the moment.

The occurrence is chosen so that long work is interrupted in the middle.
"""

OTHER_FAULTS = {
    "a worker without progress, dead ranks, a pool that loses all workers": "tests/integration/pools/test_pools.py",
    "workers that die while they start, sleep, wake up or move": "tests/integration/pools/test_fleet.py",
    "machines of a cluster that are lost, and one that joins": "tests/runs/test_lost_machines.py",
    "Prefect's server, the raylet or the GCS killed or stopped": "tests/runs/test_failed_servers.py",
    "SIGINT and SIGTERM in every state of a job": "tests/runs/test_interruptions.py",
    "workers, ranks and drivers killed in runs of every family": "tests/runs/runs.toml",
    "damaged shards and policies": "tests/runs/test_faults.py",
    "any bit flipped, any file cut in half or lost": "tests/runs/test_verify_run.py",
    "two commands on one run; a changed configuration": "tests/runs/test_resume.py",
    "writers killed during a write, many writers of one name, a full disk": "tests/unit/infra/test_storage.py",
    "rewards that hang, fork, allocate memory, or are killed from outside": "tests/unit/models/test_rewards.py",
    "attacks on the sandbox, by rewards, tools and code under test": "tests/integration/scoring/test_sandbox.py",
    "judges that are down, slow or silent, or return invalid answers": "tests/integration/endpoints",
    "losses, gradients and log-probs that are not finite": "tests/unit/models/test_update_loss.py",
    "vLLM's server killed in the middle of a shard": "tests/vllm/test_vllm_run.py",
    "continuing with changed code, data or libraries": "tests/runs/test_changed_run.py",
}


@dataclass(frozen=True, slots=True)
class FaultRow:
    """Result of injecting one kind of fault into runs, as one row of a table in docs/faults.md."""

    scenario: str
    injected: str
    runs: int
    undisturbed: int
    """Number of runs with faults that ended with the same result as the run without faults."""
    lost: float
    """Number of work units that had to be started again, per injected fault."""

    def line(self) -> str:
        """Format the result as one row of a Markdown table."""
        return f"| {self.scenario} | {self.injected} | {self.runs} | {self.undisturbed} | {self.lost:.2g} |"


HEAD = """| file or process | fault | runs | ended like the undisturbed run | work units repeated per fault |
|---|---|--:|--:|--:|"""


def kind_of(run: Path, name: str) -> str:
    """Return a readable name for the kind of a file of a run, such as "shard of rollouts", or "" for plots.

    `run` is the run's directory, and `name` is the path of the file relative to it.
    """
    folder, *rest = name.split("/")
    match folder, rest:
        case "shards", _:
            schema = pa.ipc.open_file(run / name).schema
            return f"shard of {schema.metadata[b'rheostat.kind'].decode()}"
        case "manifests", ("policy", *_):
            return "manifest of a policy"
        case "manifests", ("retention", *_):
            return "tombstone"
        case "manifests", parts:
            named = [part for part in parts if not re.fullmatch(r"\d{4}(\.json)?", part)]
            stage = named[-1].removesuffix(".json")
            return f"manifest of {PROMPTS.get(stage, stage)}"
        case "policies" | "states", _:
            what = "bundle.json" if name.endswith("bundle.json") else "file"
            return f"{what} of {'weights' if folder == 'policies' else 'optimizer state'}"
        case "journal", (what, *_):
            return f"journal of {what}"
    return {"run.json": "record of the run", "lease": "lease of an epoch", "chain": "record of the chain"}.get(
        folder, ""
    )


def fault_every_file(home: Path, api: str) -> Iterator[FaultRow]:
    """Inject faults into a small run while it writes each kind of file, and yield one result per fault.

    The faults are SIGKILL and a full disk. `home` is a directory for the runs, and `api` is the URL of Prefect's
    server.
    """
    whole = home / "whole"
    whole.mkdir()
    assert run_once(whole, api, None) == 0, (whole / "output").read_text()[-2000:]
    run, places = whole / "store/tiny", dict[str, list[str]]()
    for name in writes_of(whole):
        if kind := kind_of(run, name):
            places.setdefault(kind, []).append(name)
    cases = [
        (kind, how, strike(names[len(names) // 2]))
        for number, (kind, names) in enumerate(places.items())
        for how, strike in (STRIKES[number % len(KILLS)], STRIKES[-1])
    ]

    def one(number: int) -> FaultRow:
        kind, how, strike = cases[number]
        place = home / f"case-{number}"
        problems = problems_after([strike], place, api, run, start=run_once)
        for problem in problems:
            sys.stderr.write(f"{strike}: {problem}\n")
        return FaultRow(kind, how, 1, int(not problems), begun_again(place))

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for number, row in enumerate(pool.map(one, range(len(cases))), start=1):
            if number % 10 == 0:
                sys.stderr.write(f"{number} of {len(cases)}\n")
            yield row


def fault_processes(home: Path, api: str) -> Iterator[FaultRow]:
    """Kill or stop the workers and drivers of runs on Ray processes, and yield one result per scenario.

    `home` is a directory for the runs, and `api` is the URL of Prefect's server.
    """
    whole = Job(home / "ray", api, counts_works=True)
    assert whole.train().code == 0
    for number, (scenario, (faults, overrides)) in enumerate(PROCESSES.items()):
        sys.stderr.write(f"{scenario}\n")
        job = Job(home / f"ray-{number}", api, counts_works=True)
        starts = (
            [[fault] for fault in faults] if faults[0].role == "driver" else [faults]
        )  # the first fault ends a driver
        struck, code = 0, -1
        for planted in (*starts, []):
            code = job.train(*overrides, faults=planted).code
            struck += job.struck()
            if code == 0:
                break
        same = manifests_of(job.run) == manifests_of(whole.run) and shards_of(job.run) == shards_of(whole.run)
        is_equal = code == 0 and same and not leftovers_of(job.run) and not checker.problems_of(job.run)
        again = sum(times - 1 for times in job.works().values())
        yield FaultRow(scenario, f"{struck} of {len(faults)} injected", 1, int(is_equal), again / max(1, struck))


@dataclass(frozen=True, slots=True)
class Share:
    """Duration of a job without faults, and with faults that kill 10% of the work units of each stage."""

    struck: int
    planted: int
    undisturbed_seconds: float
    """Seconds of the run without faults from the first iteration's plan to the end of the last iteration."""
    seconds: float


def productive_share(home: Path, api: str) -> Share:
    """Run a job without faults, and again with 10% of the work units of each stage killed. Return both durations.

    `home` is a directory for the runs, and `api` is the URL of Prefect's server.
    """
    whole = Job(home / "share-whole", api, counts_works=True)
    assert whole.train(*SHARE_JOB).code == 0
    choose, faults = random.Random(0), []
    for method, (role, moment, times) in STAGES.items():
        works = sorted(work for work in whole.works() if work.startswith(f"{method} ") and "iteration=0" not in work)
        chosen = choose.sample(works, ceil(FAILED_SHARE * len(works)))
        faults += [Fault(role, moment, f"^{re.escape(work)}$", count=times) for work in chosen]
    job = Job(home / "share", api, counts_works=True)
    ended = job.train(*SHARE_JOB, faults=faults)
    assert ended.code == 0, ended.output
    assert manifests_of(job.run) == manifests_of(whole.run)
    return Share(job.struck(), len(faults), seconds_of(whole), seconds_of(job))


def seconds_of(job: Job) -> float:
    """Return the seconds of a job from the plan of the first iteration to the end of the last iteration."""
    times = [
        datetime.fromisoformat(json.loads((job.run / f"manifests/{key}.json").read_text())["provenance"]["created"])
        for key in ("it-0001/plan", "it-0003/seal")
    ]
    return (times[1] - times[0]).total_seconds()


@dataclass(frozen=True, slots=True)
class SignalEnd:
    """Seconds that `rheostat train` takes to end after SIGINT and SIGTERM, if the job is in a given state."""

    state: str
    seconds: dict[str, float]
    """Seconds from the signal to the end of the command, by the name of the signal."""
    gone_seconds: float
    """Seconds from the signal until all processes of the job had ended, as the maximum over signals."""

    def line(self) -> str:
        """Format the times as one row of a Markdown table."""
        durations = " | ".join(f"{self.seconds[number.name]:.1f}" for number in SIGNALS)
        return f"| {self.state} | {durations} | {self.gone_seconds:.1f} |"


def send_signals(home: Path, api: str) -> Iterator[SignalEnd]:
    """Interrupt a small job with SIGINT and SIGTERM in each of its states, and yield the times until it ends.

    `home` is a directory for the runs, and `api` is the URL of Prefect's server.
    """
    for index, state in enumerate(STATES):
        ended = {number.name: interrupt(state, number, home / f"{index}-{number.name}", api) for number in SIGNALS}
        for name, how in ended.items():
            sys.stderr.write(f"{state}, {name}: {how.seconds:.1f} s, {how.gone_seconds:.1f} s\n")
        seconds = {name: how.seconds for name, how in ended.items()}
        yield SignalEnd(state, seconds, max(how.gone_seconds for how in ended.values()))


def page(files: Sequence[FaultRow], processes: Sequence[FaultRow], endings: Sequence[SignalEnd], share: Share) -> str:
    """Return the Markdown text of docs/faults.md, which reports the results of all injected faults.

    `files` and `processes` are the results by kind of file and process, and `endings` the times after signals.
    """
    rows = [*files, *processes]
    runs, num_equal = sum(row.runs for row in rows), sum(row.undisturbed for row in rows)
    others = "\n".join(f"| {what} | `{where}` |" for what, where in OTHER_FAULTS.items())
    return f"""# Faults

This page lists the faults that are injected into runs, and the work and time that each fault costs.

```
make faults    # inject all faults again and rewrite this page
```

{num_equal} of {runs} disturbed runs ended like the undisturbed run. Such a run has the same manifests with the same
digests, the same shards, and no temporary files, and an independent checker (`tests/support/checker.py`) finds no
error. The same command was repeated until it succeeded.

## Faults at the write of each kind of file

The job is two iterations of a small run. All workers are threads of one process, so a SIGKILL ends all of them. Each
fault has a separate run. Each kind of file is tested with one of the three kills, and with a full disk.

{HEAD}
{chr(10).join(row.line() for row in files)}

## Faults of Ray processes

The number of injected faults is in the second column.

{HEAD}
{chr(10).join(row.line() for row in processes)}

## Signals

The table shows the seconds from SIGINT or SIGTERM to the end of `rheostat train`. The last column shows when the last
process of the job had ended. The job is small and runs on Ray processes. If the state names work of a worker, that
worker never finishes it. A job that does not end in order, such as one whose driver hangs, is ended by force
{END_SECONDS:g} s after the signal.

| state | SIGINT | SIGTERM | all processes ended |
|---|--:|--:|--:|
{chr(10).join(ending.line() for ending in endings)}

## Productive share of the time

The job is three iterations of twelve shards with two rollout workers. The engine sleeps about five seconds for each
shard. A tenth of the work units of each stage (generation, scoring, update) were killed once, long units in the middle
of their work: {share.struck} of {share.planted} faults were injected. The time from the first plan to the last seal is
{share.undisturbed_seconds:.0f} s without faults and {share.seconds:.0f} s with faults. This is a productive share of
**{share.undisturbed_seconds / share.seconds:.2f}**.

## Other faults

| fault | test |
|---|---|
{others}
"""


PARTS: dict[str, Callable[[Path, str], object]] = {
    "share": lambda home, api: asdict(productive_share(home, api)),
    "processes": lambda home, api: [asdict(row) for row in fault_processes(home, api)],
    "signals": lambda home, api: [asdict(ending) for ending in send_signals(home, api)],
    "files": lambda home, api: [asdict(row) for row in fault_every_file(home, api)],
}


def main() -> None:
    """Inject all faults and write docs/faults.md. Parts whose results build/faults.json contains are not run again."""
    MEASURED.parent.mkdir(exist_ok=True)
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        home = Path(folder)
        (home / "prefect").mkdir()
        with prefect_server(home / "prefect") as api:
            for part, measure in PARTS.items():
                if part not in measured:
                    measured[part] = measure(home, api)
                    MEASURED.write_text(json.dumps(measured, indent=2))
                sys.stderr.write(f"{part}: done\n")
    rows = {part: [FaultRow(**row) for row in measured[part]] for part in ("files", "processes")}
    endings = [SignalEnd(**ending) for ending in measured["signals"]]
    PAGE.write_text(page(rows["files"], rows["processes"], endings, Share(**measured["share"])))
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
