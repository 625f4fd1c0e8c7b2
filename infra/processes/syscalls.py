"""System call filter for sandboxed programs, in the format of bubblewrap's option `--seccomp`.

A network namespace does not block Unix sockets in a visible folder, or virtual machine sockets (vsock). Therefore the
filter allows only internet and netlink sockets, and connected pairs of sockets. It also blocks system calls that give
access to large parts of the kernel: mounts, namespaces, io_uring (its requests bypass the filter), keyrings, BPF and
performance events.
"""

import errno
import platform
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Final

_AUDIT_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Codes of the CPU architectures in system call filters (AUDIT_ARCH_* of linux/audit.h), by machine type."""
_SYSTEM_CALLS: Final = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "clone3": (435, 435),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "userfaultfd": (323, 282),
}
"""Numbers of the system calls that the sandbox filter uses, by name: on x86_64 (asm/unistd_64.h) and on aarch64
(asm-generic/unistd.h)."""
NUMBERS: Final[Mapping[str, int]] = {
    name: numbers[platform.machine() == "aarch64"] for name, numbers in _SYSTEM_CALLS.items()
}
"""Numbers of the system calls on this machine, by name."""
_INSPECTED: Final = ("socket", "socketpair", "clone", "clone3")
"""System calls whose arguments decide whether the filter allows them, or that the filter refuses with a special error
code."""
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6, 16)  # 16: AF_NETLINK, which Python on other systems lacks
_X32_BIT: Final = 0x40000000  # asm/unistd.h: the second set of numbers on x86_64
_CLONE_NEWUSER: Final = 0x10000000  # linux/sched.h

# linux/bpf_common.h: load a word, jump if equal / if greater or equal, mask, return
_LOAD, _JUMP_EQUAL, _JUMP_FROM, _MASK, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_ALLOW: Final = 0x7FFF0000  # linux/seccomp.h
_FAIL: Final = 0x00050000
# offsets in struct seccomp_data: the call's number, the architecture, the low words of its first two arguments
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24

_Instruction = tuple[int, int, int, int]
"""Instruction of a system call filter (classic BPF): its code, the number of instructions to skip if a comparison is
true, the number if it is false, and the operand."""


def has_filter() -> bool:
    """Return whether a system call filter can be built for this machine. This requires an architecture whose system
    call numbers are known."""
    return platform.machine() in _AUDIT_ARCHITECTURES


def build_filter() -> bytes:
    """Build the system call filter of the sandbox, as an array of `struct sock_filter` in the byte order of this
    machine."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions())


def _instructions() -> Iterator[_Instruction]:
    refuse = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    yield (_LOAD, 0, 0, _ARCHITECTURE)
    yield (_JUMP_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[platform.machine()])
    yield refuse
    yield (_LOAD, 0, 0, _NUMBER)
    if platform.machine() == "x86_64":
        yield (_JUMP_FROM, 0, 1, _X32_BIT)
        yield refuse
    for name, number in NUMBERS.items():
        if name not in _INSPECTED:
            yield (_JUMP_EQUAL, 0, 1, number)
            yield refuse
    yield (_JUMP_EQUAL, 0, 1, NUMBERS["clone3"])  # its flags are behind a pointer; C libraries fall back to clone
    yield (_RETURN, 0, 0, _FAIL | errno.ENOSYS)
    yield from _guard("clone", [(_LOAD, 0, 0, _FIRST), (_MASK, 0, 0, _CLONE_NEWUSER)], allowed=(0,))
    yield from _guard("socket", [(_LOAD, 0, 0, _FIRST)], allowed=_FAMILIES)
    # Datagram sockets of a pair could be connected to other sockets.
    kinds = (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
    yield from _guard("socketpair", [(_LOAD, 0, 0, _SECOND), (_MASK, 0, 0, 0xF)], allowed=kinds)
    yield (_RETURN, 0, 0, _ALLOW)


def _guard(name: str, read: list[_Instruction], *, allowed: tuple[int, ...]) -> Iterator[_Instruction]:
    """Yield filter instructions that allow the system call `name` only if one of its arguments has a value in
    `allowed`. The instructions `read` load this argument."""
    yield (_JUMP_EQUAL, 0, len(read) + len(allowed) + 2, NUMBERS[name])
    yield from read
    for position, value in enumerate(allowed):
        yield (_JUMP_EQUAL, len(allowed) - position, 0, value)
    yield (_RETURN, 0, 0, _FAIL | errno.EPERM)
    yield (_RETURN, 0, 0, _ALLOW)
