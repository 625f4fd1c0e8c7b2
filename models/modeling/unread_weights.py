"""Reports of stored weights that a model does not read, because config.json does not describe them. Torch-free.

transformers ignores such weights with a warning. They can be harmless, such as the value head of an earlier training,
or show that config.json belongs to another model, such as one with fewer layers.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

MAX_SHOWN: Final = 3
"""Maximum number of weights that a report names."""
_REPORTS: Final = ContextVar[list[str] | None]("_REPORTS", default=None)


@contextmanager
def collect_unread_weights() -> Iterator[list[str]]:
    """Run the block, and yield a list to which every model that is loaded in the block adds a sentence about its unread
    weights. If a model is loaded several times, the list contains the sentence once."""
    reports: list[str] = []
    token = _REPORTS.set(reports)
    try:
        yield reports
    finally:
        _REPORTS.reset(token)


def report_unread_weights(names: Collection[str], files: Mapping[str, str], *, where: str, architecture: str) -> None:
    """Add a sentence about the unread weights of a model to the list of `collect_unread_weights`, if any weights are
    unread and a list is open.

    `names` are the unread weights that transformers reports, without those that it always ignores for the
    architecture. `files` contains the file of each stored weight by name.
    """
    reports = _REPORTS.get()
    if reports is None or not names:
        return
    shown = sorted(names, key=_split_numbers)
    if len(names) == 1:
        subject, verb, they = f"the weight {shown[0]}", "is", "it belongs"
    else:
        more = f" and {len(names) - MAX_SHOWN:,} more" if len(names) > MAX_SHOWN else ""
        subject, verb, they = f"{len(names):,} weights ({', '.join(shown[:MAX_SHOWN])}{more})", "are", "they belong"
    places = ", ".join(sorted({files[name] for name in names if name in files} or {*files.values()}))
    report = (
        f"{where}: {subject} in {places} {verb} not read, because {architecture} with this config.json has no such "
        f"weights. If {they} to the model, use the config.json of the same checkpoint. Otherwise nothing needs to be "
        "done, unless vLLM refuses the files."
    )
    if report not in reports:
        reports.append(report)


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Return a sort key with which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
