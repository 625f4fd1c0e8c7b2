"""Differences between the inputs of two runs, apart from their settings: training prompts, code, data files and
versions of libraries."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from rheostat.infra.counts import format_count
from rheostat.infra.store.dependencies import Dependencies, dependency_records
from rheostat.infra.store.runs import Run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.tombstones import WHOLE_RUN, deleted_parts
from rheostat.tasks.run.keys import PROMPTS

SHOWN_RANGES: Final = 8
"""Maximum number of ranges of rows that one line lists."""
_COLUMNS: Final = ("prompt_id", "answer", "columns")
"""Columns that identify a training prompt together with what its rewards read."""

Prompt = tuple[str, ...]
"""Values of a training prompt in the columns that identify it: its id, its answer and its other columns."""


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Inputs of a run, apart from its settings."""

    run: str
    """Name of the run."""
    dependencies: Dependencies | None
    """Newest code, data files and versions of libraries, or None if the run has not recorded any."""
    prompts: list[Prompt] | None
    """Training prompts in order, or None if the run does not store them."""


def read_inputs(run: Run) -> RunInputs:
    """Read the inputs of a run."""
    records = dependency_records(run)
    return RunInputs(run.name, records[-1].dependencies if records else None, _read_prompts(run))


def find_input_differences(one: RunInputs, other: RunInputs) -> list[str]:
    """Return one line for each difference between the inputs of two runs: training prompts, code, data files, and
    versions of libraries. Rows of prompts are numbered from 0, as in `rheostat rollouts` and `rheostat query`."""
    before, after = one.dependencies, other.dependencies
    changes = [] if before is None or after is None else before.changes(after)
    return [*_compare_prompts(one, other), *changes]


def _compare_prompts(one: RunInputs, other: RunInputs) -> Iterator[str]:
    before, after = one.prompts, other.prompts
    if before is None or after is None:
        missing = one.run if before is None else other.run
        yield f"training prompts cannot be compared, because {missing} does not store them"
        return
    for prompts, others, name in ((before, after, one.run), (after, before, other.run)):
        ids, rows = {prompt[0] for prompt in others}, find_new_rows(others, prompts)
        alone = [row for row in rows if prompts[row][0] not in ids]
        changed = [row for row in rows if prompts[row][0] in ids]
        if alone:
            yield f"{format_count(len(alone), 'training prompt')} only in {name}: {format_rows(alone)}"
        if changed and name == other.run:
            yield (
                f"{format_count(len(changed), 'training prompt')} with another answer or other columns in {name}: "
                f"{format_rows(changed)}"
            )


def find_new_rows(others: Sequence[Prompt], prompts: Sequence[Prompt]) -> list[int]:
    """Return the row numbers in `prompts` of the prompts that are not in `others`."""
    known = Counter(others)
    return [row for row, prompt in enumerate(prompts) if not _take(known, prompt)]


def _take(known: Counter[Prompt], prompt: Prompt) -> bool:
    """Return whether a counter still contains a prompt, and remove it once."""
    if not known[prompt]:
        return False
    known[prompt] -= 1
    return True


def format_rows(rows: Sequence[int]) -> str:
    """Return row numbers as text, with ranges, such as "rows 3 to 9, 12"."""
    spans = [[row for _, row in span] for _, span in groupby(enumerate(rows), lambda each: each[1] - each[0])]
    ranges = [f"{span[0]} to {span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    more = "" if len(ranges) <= SHOWN_RANGES else f" and {len(ranges) - SHOWN_RANGES} more ranges"
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(ranges[:SHOWN_RANGES])}{more}"


def _read_prompts(run: Run) -> list[Prompt] | None:
    """Return the training prompts of a run in order, or None if it does not store them."""
    manifest = run.find(PROMPTS["train"])
    if manifest is None or WHOLE_RUN in deleted_parts(run):
        return None
    table = read_shard(run.store, manifest.shards[0], list(_COLUMNS))
    return list(zip(*(table[name].to_pylist() for name in _COLUMNS), strict=True))
