"""Derivation of random seeds. Each random choice has a separate seed, which depends only on its purpose."""

from blake3 import blake3


def derive_seed(*parts: int | str) -> int:
    """Return a 64-bit seed that depends on the value, type and position of every part. For example, ("a", "b") gives
    another seed than ("ab",), and 1 another than "1"."""
    encoded = b"".join(_encode(part) for part in parts)
    return int.from_bytes(blake3(encoded).digest(length=8), "little")


def sample_seed(run_seed: int, iteration: int, *, prompt_row: int, sample: int) -> int:
    """Return the seed with which one completion is sampled. The seed does not depend on the attempt, the worker or the
    batch, so a retry generates the same completion."""
    return derive_seed("sample", run_seed, iteration, prompt_row, sample)


def _encode(part: int | str) -> bytes:
    body = str(part).encode()
    return b"%s%d:%s" % (b"i" if isinstance(part, int) else b"s", len(body), body)
