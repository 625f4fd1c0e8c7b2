"""Agents of a user, valid and invalid. They import no module of Rheostat."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def post(base_url, api_key, path, **body):
    """Send a request to the policy and return the decoded answer."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def chat(base_url, api_key, *messages, **fields):
    """Return the policy's answer to a chat as a message."""
    return post(base_url, api_key, "/chat/completions", messages=list(messages), **fields)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}


def talk(problem, base_url, api_key, turns=3):
    """Agent that answers each turn with its length, and returns the length of the last turn."""
    messages = [user(problem["prompt"])]
    for _ in range(turns):
        answer = chat(base_url, api_key, *messages)
        messages += [answer, user(f"{len(answer['content'] or '')} letters.")]
    return {"reward": len(answer["content"] or ""), "rewards": {"0": 0.5}}


async def talk_async(problem, base_url, api_key):
    """Agent that sends two requests at the same time, as sub-agents do, and then continues one of them."""
    first = user(problem["prompt"])
    answers = await asyncio.gather(*(asyncio.to_thread(chat, base_url, api_key, first) for _ in range(2)))
    await asyncio.to_thread(chat, base_url, api_key, first, answers[0], user("Go on."))
    return 1


def fail(problem, base_url, api_key, how="raise", mark=""):
    """Agent that misbehaves after one turn in problems whose number is even."""
    if how != "never" or problem["number"] % 2:
        chat(base_url, api_key, user(problem["prompt"]))
    if problem["number"] % 2:
        return 1.0
    print("about to fail")  # noqa: T201 -- the last line of the output is reported
    return _FAILURES[how](base_url, api_key, mark)


def _raise(*_):
    raise RuntimeError("no idea")


def _sleep(*_):
    time.sleep(3600)


def _spawn(_, __, mark):
    """Start a process that leaves the session of the agent. `mark` is an argument of the process."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", mark], start_new_session=True)
    time.sleep(3600)


def _hoard(*_):
    held = bytearray(400 << 20)
    time.sleep(3600)
    return len(held)


def _flood(base_url, api_key, _):
    def send(_):
        try:
            chat(base_url, api_key, user("again"), n=2)
        except urllib.error.HTTPError:
            return

    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(send, range(5000)):
            pass
    return 1.0


def _foreign(base_url, *_):
    chat(base_url, "x" * 43, user("hello"))


_FAILURES = {
    "raise": _raise,
    "exit": lambda *_: os._exit(7),
    "kill": lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": _sleep,
    "spawn": _spawn,
    "hoard": _hoard,
    "flood": _flood,
    "foreign": _foreign,
    "never": lambda *_: 1.0,
    "infinite": lambda *_: float("inf"),
    "key": lambda *_: {"rewards_": 1},
    "object": lambda *_: object(),
    "large": lambda *_: {"reward": "x" * (2 << 20)},
}


def kill_host(problem, base_url, api_key, marks=""):
    """Agent that kills the process from which it was started, once."""
    chat(base_url, api_key, user(problem["prompt"]))
    try:
        Path(marks, "killed").touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)
    return 1.0


def kill_worker(problem, base_url, api_key, journals="", marks=""):
    """Agent with one turn in problems whose number is even, else with three. The first agent of the others kills the
    rollout worker after two turns, once the journal contains the ends of two other episodes."""
    messages = [user(problem["prompt"])]
    for turn in range(3 if problem["number"] % 2 else 1):
        if turn == 2 and not Path(marks, "killed").exists():
            while len([*Path(journals).glob("*/2-*/end.json")]) < 2 or len([*Path(journals).glob("*/3-*/*.json")]) < 4:
                time.sleep(0.01)
            with contextlib.suppress(FileExistsError):
                Path(marks, "killed").touch(exist_ok=False)
                parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
                os.kill(int(parent), signal.SIGKILL)
            time.sleep(3600)
        answer = chat(base_url, api_key, *messages)
        messages += [answer, user("Go on.")]
    return 1.0


def wait_for_file(problem, base_url, api_key, path=""):
    """Agent that waits between two turns until a file exists."""
    messages = [user(problem["prompt"])]
    messages += [chat(base_url, api_key, *messages), user("Go on.")]
    while not Path(path).exists():
        time.sleep(0.01)
    chat(base_url, api_key, *messages)
    return 1.0


def late(problem, base_url, api_key, seconds=1.0):
    """Agent that sleeps before its only turn."""
    time.sleep(seconds)
    chat(base_url, api_key, user(problem["prompt"]))
    return 1.0


def vary(problem, base_url, api_key, marks=""):
    """Agent whose second request differs each time that it starts for a problem."""
    messages = [user(problem["prompt"])]
    run = Path(marks, f"{problem['number']}-{os.environ['RHEOSTAT_SEED']}")
    number = int(run.read_text()) + 1 if run.exists() else 0
    run.write_text(str(number))
    for turn in range(3):
        answer = chat(base_url, api_key, *messages)
        messages += [answer, user(f"Go on {number if turn == 0 else ''}.")]
    return 1.0


def kill_later(problem, base_url, api_key, marks=""):
    """Agent like `talk` that kills the rollout worker before it returns, once, if the file `armed` exists."""
    result = talk(problem, base_url, api_key)
    if Path(marks, "armed").exists() and not Path(marks, "killed").exists():
        Path(marks, "killed").touch()
        parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGKILL)
        time.sleep(3600)
    return result


def look(problem, base_url, api_key, port=0, folder=""):
    """Agent that reports what it can reach: the policy, a port of the host, other processes, files and variables."""
    chat(base_url, api_key, user(problem["prompt"]))
    found = {
        "variables": sorted(name for name in os.environ if "SECRET" in name),
        "others": len([*Path("/proc").iterdir()]),
    }
    try:
        Path("/proc/1/fd/1").open("w").close()
        found["runner"] = True
    except OSError:
        found["runner"] = False
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)
        found["port"] = True
    except OSError:
        found["port"] = False
    try:
        Path(folder, "written").write_text("x")
        found["writes"] = True
    except OSError:
        found["writes"] = False
    raise RuntimeError(json.dumps(found))


class Writes:
    """Agent that writes a file when its object is created."""

    def __init__(self, path):
        Path(path).write_text("x")

    def __call__(self, problem, base_url, api_key):
        """Return nothing."""


class Counter:
    """Agent that is loaded once, and counts its calls."""

    def __init__(self, start):
        self.count = start

    def __call__(self, problem, base_url, api_key):
        """Return the number of calls, which is 1 more than the start in every process of an agent."""
        chat(base_url, api_key, user(problem["prompt"]))
        self.count += 1
        return self.count


class Helped:
    """Agent whose object has started a helper process, which every call uses."""

    def __init__(self):
        self.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)

    def __call__(self, problem, base_url, api_key):
        """Return whether the helper runs."""
        os.kill(self.helper.pid, 0)
        return True


def act(problem, base_url, api_key):
    """Agent without turns that does what the problem says, and returns 1."""
    match problem["do"]:
        case "write":
            Path(problem["path"]).touch()
        case "sleep":
            time.sleep(3600)
        case "nest":
            nested = 1
            for _ in range(300):
                nested = [nested]
            return nested
        case "daemon":  # a process that leaves the session and is the parent of another process
            child = f"subprocess.Popen([sys.executable, *{_sleeper(problem)}])"
            code = f"import subprocess, sys, time; {child}; time.sleep(3600)"
            subprocess.Popen([sys.executable, "-c", code, problem["mark"]], start_new_session=True)
            time.sleep(1)
        case "lose":  # the process that started it, while a process of its own runs
            subprocess.Popen([sys.executable, *_sleeper(problem)], start_new_session=True)
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(3600)
    return 1


def _sleeper(problem):
    return ["-c", "import time; time.sleep(3600)", problem["mark"]]


def nap(problem, base_url, api_key, seconds=1.0):
    """Agent that sleeps between two turns."""
    messages = [user(problem["prompt"])]
    messages += [chat(base_url, api_key, *messages), user("Go on.")]
    time.sleep(seconds)
    chat(base_url, api_key, *messages)
    return 1.0


def main():
    """Program: one turn, and a result in the file that the environment names."""
    problem = json.loads(Path(os.environ["RHEOSTAT_PROBLEM"]).read_text())
    answer = chat(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], user(problem["prompt"]))
    result = Path(os.environ["RHEOSTAT_RESULT"])
    match sys.argv[1:]:
        case ["link"]:
            result.symlink_to("/etc/passwd")
        case ["directory"]:
            result.mkdir()
        case ["pipe"]:
            os.mkfifo(result)
        case _:
            result.write_text(json.dumps({"reward": len(answer["content"] or "")}))


if __name__ == "__main__":
    main()
