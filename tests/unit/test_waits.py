"""Every wait in the packages ends: by a time limit, or because the awaited process is watched."""

import ast
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parents[2]
ROOMS = ("flows", "tasks", "models", "placement", "infra")

BOUNDED = {
    "flows/controllers.py: controller_span.requests.get": "a controller, which ends with its run",
    "infra/processes/guard.py: guard.communicate": "a guard that is told to end, and kills what is left within limits",
    "tasks/run/preflight.py: process.wait": "the loop in `preflight` looks at the process",
    "tasks/run/preflight.py: checking.result": "is done",
    "models/engines/local/continuous.py: call.done.result": "the decoding thread, which ends every call",
    "models/engines/local/continuous.py: scoring.done.result": "the decoding thread, which ends every call",
    "models/engines/local/continuous.py: self._changed.wait": "a call, or the end of the decoder's block",
    "models/engines/local/continuous.py: self._thread.join": "the decoding thread, which ends after its current step",
    "models/engines/vllm/servers.py: future.result": "the executor's end has waited, each request has a limit",
    "models/engines/vllm/plugin/rheostat_completions.py: lines.get": "in vLLM, whose owner watches its progress",
    "models/engines/vllm/plugin/rheostat_http.py: asyncio.wait": "in vLLM, whose owner watches its progress",
    "models/engines/vllm/plugin/rheostat_http.py: sending.result": "is done",
    "models/agents/door.py: answer.result": "is done",
    "models/text/chats.py: process.communicate": "is killed, or has ended its answers and is limited in CPU time",
    "infra/processes/child.py: self._process.communicate": "is killed",
    "models/environments/episodes.py: answering.result": "every step has its seconds",
    "infra/store/bucket.py: part.result": "a question to the server, which has a limit",
    "infra/store/epochs.py: answer.result": "a question to the store, in another thread, and so ends as any question",
    "infra/store/bundles.py: proof.result": "a thread that reads files of the store, and so ends or fails as any read",
    "infra/store/file_writer.py: step.result": "a thread that writes or hashes a piece, and ends as any write",
    "infra/store/lease.py: renewing.join": "is told to end, and every question to the server has a limit",
    "models/training/states.py: copying.result": "a copy from a device's memory to the host's, which is then hashed",
    "models/training/states.py: writing.result": "a thread that writes to the store, and so ends or fails as any write",
    "models/training/ranks.py: dist.recv": "a rank: its pool kills the group when it makes no progress",
    "infra/environments/install.py: subprocess.run": "pip has limits of its own for each answer of an index",
    "infra/pools/cluster.py: leave.wait": "the thread that keeps a connection as long as it is wanted",
    "infra/pools/fleet.py: asyncio.wait": "an arrangement: every start and every sleep in it has a limit",
    "infra/pools/fleet.py: task.result": "is done",
    "infra/pools/forks.py: connection.recv": "a socket with a limit, and the fork that waits for its word",
    "infra/processes/containers.py: self._listener.accept": "does not block",
    "infra/pools/forks.py: listener.accept": "the forkserver, which its guard ends",
    "infra/pools/host.py: threading.Event().wait": "waits for the end of its process on purpose",
    "infra/pools/pool.py: asyncio.wait": "the use of a worker: it ends when the worker makes no progress",
    "infra/pools/pool.py: use.result": "is done",
    "infra/pools/pool.py: self._changed.wait": "workers, which end their work, start or fail within limits",
    "infra/pools/pool.py: turn.result": "is done",
    "infra/pools/placement_group.py: starting.result": "is done",
    "infra/pools/ranks.py: task.result": "is done",
    "infra/pools/threads.py: self._works.get": "a worker's thread, which is told when to end",
    "infra/pools/threads.py: answer.result": "is done",
    "infra/pools/worker.py: query.result": "is done",
    "infra/pools/worker.py: starting.result": "is done",
    "infra/pools/worker.py: asyncio.wait": "one of the two is the watch over the worker's progress",
    "models/workers/update.py: models.states.wait": "writes of optimizer states, which end or fail by themselves",
    "tasks/run/open_run.py: opened.result": "is done",
    "tasks/run/stages.py: asyncio.wait": "works of a stage: each waits for its pool, or for commits within limits",
    "tasks/run/stages.py: ended.result": "is done",
    "infra/processes/watch.py: threading.main_thread().join": "a thread that waits for the process's own end",
    "infra/processes/watch.py: reads.recv": "a thread that ends with the run",
    "flows/child_process.py: process.communicate": "a child that trains a fork, and ends with this process",
    "infra/trackers/processes.py: mirror.wait": "a process that is killed once it has been silent for too long",
    "infra/trackers/processes.py: process.wait": "was killed, or is waited for by a thread that nobody waits for",
    "tasks/reporting.py: plot_task.result": "is done",
    "tasks/reporting.py: text_task.result": "is done",
}
"""Waits without a time limit, and why they end."""

BLOCKING = ("wait", "join", "acquire", "get", "result")
"""Methods that wait forever without a limit: of processes, threads, locks, queues and futures."""
COMMANDS = ("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "asyncio.wait")

RECEIVING = ("communicate", "recv", "accept")
"""Methods that wait until another process sends something or ends."""
METHODS = {*BLOCKING, *RECEIVING, "wait_for", *(command.rpartition(".")[2] for command in COMMANDS)}


def _method(call: ast.Call) -> str:
    """Return the last name of the function or method that is called, or ""."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def unbounded(tree: ast.AST) -> Iterator[str]:
    """Return the calls that may wait forever."""
    limited = set()
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith) and any("asyncio.timeout(" in ast.unparse(item) for item in node.items):
            limited |= set(map(id, ast.walk(node)))
        if isinstance(node, ast.Call) and _method(node) in METHODS:
            calls.append(node)
            if ast.unparse(node.func) == "asyncio.wait_for":
                limited |= set(map(id, ast.walk(node)))
    for call in (call for call in calls if id(call) not in limited):
        what = ast.unparse(call.func)
        owner, _, method = what.rpartition(".")
        has_limit = "timeout" in {keyword.arg for keyword in call.keywords}
        waits = owner and not owner.isupper() and not owner.endswith("Context") and method in BLOCKING and not call.args
        if not has_limit and (waits or what in COMMANDS or method in RECEIVING):
            yield what


def test_every_wait_has_a_time_limit_or_a_documented_end():
    found = {
        f"{path.relative_to(HOME)}: {what}"
        for room in ROOMS
        for path in sorted((HOME / room).rglob("*.py"))
        for what in unbounded(ast.parse(path.read_text()))
    }
    assert sorted(found - set(BOUNDED)) == [], "give it a limit, or say above why it ends"
    assert sorted(set(BOUNDED) - found) == [], "no longer there"
