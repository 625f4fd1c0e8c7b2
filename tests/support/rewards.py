"""Rewards that behave like rewards of users. The completion selects the behaviour."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def obedient(prompt: str, completion: str, answer: str) -> float:
    """Return the completion as a number, or do the harm that it names."""
    if completion == "hang":
        time.sleep(3600)
    if completion == "slow":
        time.sleep(1)
        return 5.0
    if completion == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if completion == "exit":
        os._exit(0)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "close":
        os.closerange(0, 1000)
        time.sleep(2.5)
    if completion in ("crash", "close"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "raise":
        raise RuntimeError(f"cannot judge\n{object()!r}")
    if completion == "leave":
        sys.exit(3)
    if completion == "none":
        return None  # type: ignore[return-value]
    return float(completion)


def printing(prompt: str, completion: str, answer: str) -> float:
    """Print the completion."""
    print(completion, file=sys.stderr)  # noqa: T201 -- as users do
    return 0.0


def length(prompt: str, completion: str, answer: str, *, scale: float = 1.0) -> float:
    """Return the completion's length."""
    return scale * len(completion)


def leave_pid_and_hang(prompt: str, completion: str, answer: str) -> float:
    """Write the ids of this process and of one it starts to the file that the completion names, and never return."""
    started = subprocess.Popen(["sleep", "3600"])
    path = Path(completion)
    path.with_suffix(".part").write_text(f"{os.getpid()} {started.pid}")
    path.with_suffix(".part").rename(path)
    time.sleep(3600)
    return 0.0


def never(prompt: str, completion: str, answer: str, *, told: str) -> float:
    """Create the file, and sleep for longer than any test."""
    Path(told).touch()
    time.sleep(3600)
    return 0.0


def tell_pid_and_wait(prompt: str, completion: str, answer: str) -> float:
    """Add the id of this process to the file that the completion names, and return 3 half a second later."""
    with Path(completion).open("a") as told:
        told.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    return 3.0


def wait_to_be_killed_twice(prompt: str, completion: str, answer: str) -> float:
    """Add the id of this process to the file that the completion names, and wait if it is the second or third."""
    path = Path(completion)
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(path.read_text().split()) in (2, 3):
        time.sleep(3600)
    return 3.0


def in_a_queue(prompt: str, completion: str, answer: str, *, seconds: float) -> float:
    """Use this number of seconds of one processor, and return the elapsed seconds."""
    began = time.monotonic()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    while time.process_time() < seconds:
        pass
    return time.monotonic() - began


def killed_in_turns(prompt: str, completion: str, answer: str) -> float:
    """End this process by another signal at every call. The file that the completion names counts the calls."""
    turns = Path(completion)
    with turns.open("a") as file:
        file.write("x")
    signals = (signal.SIGKILL, signal.SIGTERM, signal.SIGRTMIN + 6, signal.SIGUSR1)
    os.kill(os.getpid(), signals[(len(turns.read_text()) - 1) % len(signals)])
    time.sleep(10)
    return 0.0


async def asynchronous(prompt: str, completion: str, answer: str) -> float:
    """Return a coroutine, which no caller awaits."""
    return 1.0


def two_arguments(prompt: str, completion: str) -> float:
    """Accept too few arguments."""
    return 1.0


NUMBER = 7


def even(prompt: str, completion: str, answer: str) -> float:
    """Return 1 for an even number of characters, so that any policy is right for some completions of every group."""
    return float(len(completion) % 2 == 0)


def even_unless_impossible(prompt: str, completion: str, answer: str) -> float:
    """Return 0 for the answer "impossible", and otherwise whether the completion has an even length."""
    return float(answer != "impossible" and len(completion) % 2 == 0)


def mean_letter(prompt: str, completion: str, answer: str) -> float:
    """Return the mean code of the characters, which differs among completions of a random policy."""
    return sum(map(ord, completion)) / max(1, len(completion))


def stepwise(prompt: str, completion: str, answer: str, *, steps: list[str], scale: float = 1.0) -> list[float]:
    """Return each step as a number, or do the harm that the first step names."""
    harm = steps[0].strip()
    if harm == "few":
        return [1.0] * (len(steps) - 1)
    if harm == "many":
        return [1.0] * (len(steps) + 1)
    if harm == "text":
        return "1" * len(steps)  # type: ignore[return-value]
    if harm == "words":
        return ["one"] * len(steps)  # type: ignore[list-item]
    if harm == "endless":
        return itertools.count()  # type: ignore[return-value]
    if harm in ("hang", "raise", "crash", "leave", "none"):
        obedient(prompt, harm, answer)
        return None  # type: ignore[return-value]
    return [scale * float(step) for step in steps]


def lengths_of_tokens(prompt: str, completion: str, answer: str, *, tokens: list[str]) -> list[float]:
    """Return the number of characters of each token."""
    assert "".join(tokens) == completion
    return [float(len(token)) for token in tokens]


def brightness(prompt: str, completion: str, answer: str, images: list[bytes]) -> float:
    """Return the mean of the last image's numbers, from 0 to 255."""
    from io import BytesIO

    from PIL import Image, ImageStat

    return float(sum(ImageStat.Stat(Image.open(BytesIO(images[-1]))).mean) / 3)


def share_of_red(prompt: str, completion: str, answer: str, images: list[bytes]) -> float:
    """Return the share of images that are red, or -1 if there are none."""
    from io import BytesIO

    from PIL import Image

    red = [Image.open(BytesIO(image)).getpixel((0, 0)) == (255, 0, 0) for image in images]
    return sum(red) / len(red) if red else -1.0


def needs_rgba(prompt: str, completion: str, answer: str, images: list[bytes]) -> float:
    """Read only images that have a fourth channel."""
    from io import BytesIO

    from PIL import Image

    if (mode := Image.open(BytesIO(images[0])).mode) != "RGBA":
        raise ValueError(f"expected RGBA, found {mode}")
    return 1.0


def says_nothing(prompt: str, completion: str, answer: str, images: list[bytes]) -> float:
    """Return nothing."""
    return None  # type: ignore[return-value]


def told(prompt, completion, answer, messages):
    """Number of the messages that the reward received, in order."""
    return sum((place + 1) * (len(each["role"]) + len(each["content"])) for place, each in enumerate(messages))


def turn_lengths(prompt, completion, answer, turns):
    return [float(len(turn)) for turn in turns]


def wait_for_signals(prompt: str, completion: str, answer: str, *, path: str, signals: int) -> float:
    """Return the completion as a number, or add this process to the file and wait until a signal ends it.

    After that number of processes, return 3.
    """
    if completion != "wait":
        return float(completion)
    with Path(path).open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(Path(path).read_text().splitlines()) <= signals:
        time.sleep(3600)
    return 3.0


def explained(prompt: str, completion: str, answer: str, *, prefix: str = "") -> tuple[float, str]:
    """Return the length of the completion, with the completion or a text that it names as feedback."""
    texts = {"exact": "é" * 4000, "long": "é" * 4001, "half": "half \ud83d"}
    text = texts.get(completion, completion)
    return float(len(completion)), prefix + text if text else ""


def pair_or_not(prompt: str, completion: str, answer: str) -> object:
    """Return what the completion names: a pair of a score and a text, or something else."""
    pair = (1.0, "fine")
    others = {"number": 0.5, "three": (0.5, "a", "b"), "bytes": (0.5, b"a"), "nan": (float("nan"), "a")}
    return others.get(completion, pair)
