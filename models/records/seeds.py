"""Seeds: every random choice has its own, derived from what the choice is for and from nothing else."""

from blake3 import blake3


def derive_seed(*parts: int | str) -> int:
    """Return 64 bits that depend on every part, its type and its place: ("a", "b") is not ("ab",), 1 is not "1"."""
    encoded = b"".join(_encode(part) for part in parts)
    return int.from_bytes(blake3(encoded).digest(length=8), "little")


def sample_seed(run_seed: int, iteration: int, *, prompt_row: int, sample: int) -> int:
    """Return the seed of one completion; no attempt, worker or batch enters, so a repeated attempt repeats it."""
    return derive_seed("sample", run_seed, iteration, prompt_row, sample)


def _encode(part: int | str) -> bytes:
    body = str(part).encode()
    return b"%s%d:%s" % (b"i" if isinstance(part, int) else b"s", len(body), body)
