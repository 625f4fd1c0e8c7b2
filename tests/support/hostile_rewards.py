"""Rewards that attack their process. The completion selects the attack. Only the standard library is used."""

import builtins
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

POISONED = [0.0]
FORGED = json.dumps(["0" * 16, 1.0, None, None]).encode()
FORGED = len(FORGED).to_bytes(4, "big") + FORGED
PLANTED = (
    "import os; os.write(1, b'1.0'); open('/tmp/passed', 'w').close(); os.kill(os.getppid(), {signal}); os._exit(0)"
)


class Liar:
    """Object that equals everything and is not a number."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__

    def __float__(self) -> float:
        raise SystemExit(0)


def hostile(prompt: str, completion: str, answer: str, *, port: int = 0) -> float:
    """Return 1 if the attack succeeds. If the completion is a number and no attack, return the number."""
    attack = globals().get(f"attack_{completion}")
    if attack is None:
        return float(completion)
    return attack(prompt, port)


def attack_exit(secret: str, port: int) -> float:
    sys.exit(0)


def attack_hard_exit(secret: str, port: int) -> float:
    os._exit(0)


def attack_kill_parent(secret: str, port: int) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(10)
    return 1.0


def attack_kill_all(secret: str, port: int) -> float:
    os.kill(-1, signal.SIGKILL)
    time.sleep(10)
    return 1.0


def attack_lie(secret: str, port: int) -> float:
    return Liar()  # type: ignore[return-value]


def attack_forge(secret: str, port: int) -> float:
    for number in range(64):
        try:
            os.write(number, FORGED)
        except OSError:
            continue
    os._exit(0)


def attack_poison(secret: str, port: int) -> float:
    found, POISONED[0] = POISONED[0], 1.0
    host = sys.modules["__main__"]
    for name in ("value_of", "_number", "_send", "_apart"):
        setattr(host, name, lambda *_: [1.0, None])
    builtins.float = lambda _: 1.0  # type: ignore[assignment, misc]
    sys.settrace(lambda *_: None)
    return found


def attack_sentinel(secret: str, port: int) -> float:
    places = [Path("/tmp/passed"), Path("/dev/shm/passed"), Path("/tmp/deep/passed")]
    found = any(place.exists() for place in places)
    places[2].parent.mkdir(exist_ok=True)
    for place in places:
        place.touch()
    places[2].parent.chmod(0)
    return 1.0 if found else 0.0


def attack_secret(secret: str, port: int) -> float:
    files = [*Path("/proc").glob("*/environ"), *Path("/proc").glob("*/cmdline"), Path(secret)]
    for file in files:
        try:
            if b"canary" in file.read_bytes().replace(str(secret).encode(), b""):
                return 1.0
        except OSError:
            continue
    return 1.0 if "canary" in str(os.environ) else 0.0


def attack_parent(secret: str, port: int) -> float:
    """Modify the process that judges, which outlives the call."""
    for file, mode in (
        ("mem", "r+b"),
        ("fd/0", "rb"),
        ("fd/1", "wb"),
        ("fd/3", "rb"),
        ("fd/4", "wb"),
        ("environ", "rb"),
    ):
        try:
            with Path(f"/proc/{os.getppid()}/{file}").open(mode):
                return 1.0
        except OSError:
            continue
    return 0.0


def attack_ptrace(secret: str, port: int) -> float:
    """Attach to the process that judges."""
    attach, detach = 16, 17
    libc = ctypes.CDLL(None)
    if libc.ptrace(attach, os.getppid(), None, None) != 0:
        return 0.0
    os.waitpid(os.getppid(), 0)
    libc.ptrace(detach, os.getppid(), None, None)
    return 1.0


def attack_symlink(secret: str, port: int) -> float:
    """Read through links, and leave links that a clean-up might follow."""
    places = [Path(secret), Path(f"/proc/1/root{secret}"), Path(f"/proc/{os.getppid()}/root{secret}")]
    for number, place in enumerate(places):
        link = Path(f"/tmp/link-{number}")
        link.symlink_to(place)
        try:
            link.read_bytes()
        except OSError:
            continue
        return 1.0
    Path("/tmp/folder").symlink_to("/usr")
    Path("/tmp/itself").symlink_to("/tmp")
    return 0.0


def attack_network(secret: str, port: int) -> float:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return 0.0
    return 1.0


def attack_write(secret: str, port: int) -> float:
    for folder in (Path.cwd(), Path(__file__).parent, Path("/"), Path("/dev"), Path("/usr"), Path(secret).parent):
        if folder == Path("/tmp"):  # where programs run, and nothing stays
            continue
        try:
            (folder / "planted").write_text("here")
        except OSError:
            continue
        return 1.0
    return 0.0


def attack_orphans(secret: str, port: int) -> float:
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp("sleep", ["sleep", secret.rpartition("-")[2]])
            os._exit(0)
    return 0.0


def attack_program(secret: str, port: int) -> float:
    """Run the code of a completion correctly, in a separate process, and compare its output."""
    done = subprocess.run([sys.executable, "-c", PLANTED.format(signal=0)], capture_output=True, text=True, check=False)
    return 1.0 if done.stdout == "42" else 0.0


def attack_killing_program(secret: str, port: int) -> float:
    subprocess.run([sys.executable, "-c", PLANTED.format(signal=9)], check=False)
    return 1.0


def attack_memory(secret: str, port: int) -> float:
    return float(len(bytearray(1 << 36)))


def attack_large_file(secret: str, port: int) -> float:
    with Path("/tmp/large").open("wb") as file:
        while True:
            file.write(b"x" * (1 << 20))


def attack_many_files(secret: str, port: int) -> float:
    for number in range(1 << 20):
        Path(f"/tmp/{number}").write_bytes(b"x" * (1 << 16))
    return 1.0


def attack_hoard(secret: str, port: int) -> float:
    """Allocate memory in many processes, each within its limit."""
    for _ in range(16):
        if os.fork() == 0:
            held = b"x" * (200 << 20)
            time.sleep(10)
            os._exit(len(held) % 2)
    time.sleep(10)
    return 1.0


def attack_flood(secret: str, port: int) -> float:
    """Write a hundred megabytes."""
    for _ in range(100):
        os.write(1, b"1.0\n" * (1 << 18))
    return 1.0


def attack_loop(secret: str, port: int) -> float:
    while True:
        pass


def attack_output(secret: str, port: int) -> float:
    while True:
        os.write(1, b"1.0\n" * 4096)


def attack_answer(secret: str, port: int) -> float:
    for number in range(3, 64):
        try:
            while True:
                os.write(number, b"\xff" * 65536)
        except OSError:
            continue
    return 1.0


def attack_bomb(secret: str, port: int) -> float:
    while True:
        os.fork()
