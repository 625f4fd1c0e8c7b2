"""Differences between the inputs of two runs, apart from their settings: training prompts, code, data files and
versions of libraries."""

from collections import Counter
from collections.abc import Iterator, Sequence
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

_Prompt = tuple[str, ...]


def find_input_differences(one: Run, other: Run) -> list[str]:
    """Return one line for each difference between the inputs of two runs: training prompts, code, data files, and
    versions of libraries. Rows of prompts are numbered from 0, as in `rheostat rollouts` and `rheostat query`."""
    before, after = _newest_dependencies(one), _newest_dependencies(other)
    changes = [] if before is None or after is None else before.changes(after)
    return [*_compare_prompts(one, other), *changes]


def _newest_dependencies(run: Run) -> Dependencies | None:
    records = dependency_records(run)
    return records[-1].dependencies if records else None


def _compare_prompts(one: Run, other: Run) -> Iterator[str]:
    before, after = _read_prompts(one), _read_prompts(other)
    if before is None or after is None:
        return
    lists = ((before, after, one.name), (after, before, other.name))
    for prompts, others, name in lists:
        ids, known = {prompt[0] for prompt in others}, Counter(others)
        rows = [row for row, prompt in enumerate(prompts) if not _take(known, prompt)]
        alone = [row for row in rows if prompts[row][0] not in ids]
        changed = [row for row in rows if prompts[row][0] in ids]
        if alone:
            yield f"{format_count(len(alone), 'training prompt')} only in {name}: {_format_rows(alone)}"
        if changed and name == other.name:
            yield (
                f"{format_count(len(changed), 'training prompt')} with another answer or other columns in {name}: "
                f"{_format_rows(changed)}"
            )


def _take(known: Counter[_Prompt], prompt: _Prompt) -> bool:
    """Return whether a counter still contains a prompt, and remove it once."""
    if not known[prompt]:
        return False
    known[prompt] -= 1
    return True


def _format_rows(rows: Sequence[int]) -> str:
    spans = [[row for _, row in span] for _, span in groupby(enumerate(rows), lambda each: each[1] - each[0])]
    ranges = [f"{span[0]} to {span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]
    more = "" if len(ranges) <= SHOWN_RANGES else f" and {len(ranges) - SHOWN_RANGES} more ranges"
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(ranges[:SHOWN_RANGES])}{more}"


def _read_prompts(run: Run) -> list[_Prompt] | None:
    """Return the training prompts of a run in order, or None if it does not store them."""
    manifest = run.find(PROMPTS["train"])
    if manifest is None or WHOLE_RUN in deleted_parts(run):
        return None
    table = read_shard(run.store, manifest.shards[0], list(_COLUMNS))
    return list(zip(*(table[name].to_pylist() for name in _COLUMNS), strict=True))
