"""Differences between two runs, each a possible cause why one of them is worse."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby, pairwise
from math import ceil
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from rheostat.infra.config import Settings, changed_keys
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.store.dependencies import Dependencies
from rheostat.infra.store.inputs import PathNames, paths_in
from rheostat.infra.store.runs import Run
from rheostat.models.config.conflicts import slot_engines
from rheostat.models.data.problems import load_problems
from rheostat.tasks.config.documents import toml_value
from rheostat.tasks.config.run import LAYOUT, RunConfig
from rheostat.tasks.forks.conflicts import find_fixed, fixed_settings
from rheostat.tasks.lineage.differences import Prompt, RunInputs, find_new_rows, format_rows, read_inputs
from rheostat.tasks.views.metrics import sealed_iterations

_IGNORED: Final = ("evaluation.", "iterations.")
"""Prefixes of settings that are not compared: those of the evaluation do not affect the training, and the completed
iterations are compared instead of the configured number."""
_PLACE: Final = re.compile(r"(?P<file>.+?)(?::| row |\[)(?P<number>\d+)\]?")
"""Place of a problem in a file: `a.jsonl:3`, `a.parquet row 3` or `a.json[3]`."""
_SHOWN: Final = 60
"""Maximum number of characters of a value in a description."""
_NO_DEPENDENCIES: Final = Dependencies(code={}, data={}, libraries={})


class Candidate(Settings):
    """Difference of a run from a better run that a fork of the run can undo, and that may be the cause."""

    label: str
    """Name of what differs, such as `update.learning_rate`, as part of a sentence."""
    change: str
    """Description of how it differs, for the end of a sentence."""
    overrides: tuple[str, ...] = ()
    """Overrides that undo the difference."""
    rows: tuple[int, ...] = ()
    """Row numbers of training prompts that a fork excludes to undo the difference."""
    is_code: bool = False
    """Whether the code differs, so that a fork undoes the difference if it uses the code of the better run."""
    is_libraries: bool = False
    """Whether library versions differ. A fork undoes this difference if it is trained by a Python interpreter with the
    libraries of the better run."""

    @property
    def text(self) -> str:
        """Description of the difference in one line."""
        return f"{self.label}: {self.change}"


class Candidates(Settings):
    """All differences of a run from a better run."""

    candidates: tuple[Candidate, ...]
    """Differences that a fork can undo."""
    untested: tuple[str, ...]
    """Descriptions of the differences that a fork cannot undo."""


def find_candidates(
    good: Run,
    bad: Run,
    configs: tuple[RunConfig, RunConfig],
    *,
    iteration: int,
    num_row_ranges: int,
    has_good_python: bool = False,
) -> Candidates:
    """Find all differences between two runs. `configs` are the configurations of the better and of the worse run.

    A fork of the worse run at `iteration` can undo the candidates. Different training prompts are divided into at most
    about `num_row_ranges` candidates. Library versions are a candidate if `has_good_python` is set.
    """
    inputs = read_inputs(good), read_inputs(bad)
    candidates, untested = list[Candidate](), list[str]()
    for key, candidate in _find_settings(bad, configs):
        reason = find_fixed(key, fixed_settings(iteration))
        if reason is None:
            candidates.append(candidate)
        else:
            untested.append(f"{candidate.text} ({reason})")
    candidates += _find_iterations(good, bad)
    before, after = (each.dependencies or _NO_DEPENDENCIES for each in inputs)
    if code := find_code_changes(before, after):
        candidates.append(Candidate(label="code", change="; ".join(code), is_code=True))
    if libraries := _describe_libraries(before, after, configs):
        candidate = Candidate(label="libraries", change=libraries, is_libraries=True)
        if has_good_python:
            candidates.append(candidate)
        else:
            untested.append(f"{candidate.text} (--good-python tests this)")
    prompts = _used_prompts(good, inputs[0]), _used_prompts(bad, inputs[1])
    candidates += _find_rows(good.name, prompts, inputs[1], configs[1], num_row_ranges)
    untested += _find_untested_prompts((good.name, bad.name), prompts)
    untested += _find_untested_dependencies(before, after, configs)
    return Candidates(candidates=tuple(candidates), untested=tuple(untested))


def find_code_changes(before: Dependencies, after: Dependencies) -> list[str]:
    """Return one line for each module of users' code that differs, for code that both dependencies contain."""
    common = before.code.keys() & after.code.keys()
    return _NO_DEPENDENCIES.model_copy(update={"code": {name: before.code[name] for name in common}}).changes(
        _NO_DEPENDENCIES.model_copy(update={"code": {name: after.code[name] for name in common}})
    )


def find_libraries(dependencies: Dependencies, *configs: RunConfig) -> dict[str, str]:
    """Return the recorded versions of Python and of the libraries in the environment of Rheostat. Rheostat, and
    libraries in separate environments of inference engines and of rollout environments, are left out."""
    engines = [engine for config in configs for _, engine, _ in slot_engines(config.rollout, config.scoring)]
    environments = [config.rollout.environment for config in configs if config.rollout.environment is not None]
    separate = {name for each in (*engines, *environments) for name in each.find_library_versions()}
    return {name: version for name, version in dependencies.libraries.items() if name not in {"rheostat"} | separate}


def _describe_libraries(before: Dependencies, after: Dependencies, configs: tuple[RunConfig, RunConfig]) -> str:
    """Describe the different versions of libraries that both runs recorded, or return an empty text."""
    was, now = (find_libraries(each, *configs) for each in (before, after))
    changed = sorted(name for name in was.keys() & now.keys() if was[name] != now[name])
    return ", ".join(f"{name} {now[name]} instead of {was[name]}" for name in changed)


def _find_settings(bad: Run, configs: tuple[RunConfig, RunConfig]) -> Iterator[tuple[str, Candidate]]:
    """Yield the different settings, each with its key. If the kind of a table differs, the table is one difference."""
    good_config, bad_config = configs
    before, after = bad.settings_beside(good_config)
    changed = [key for key in changed_keys(before, after) if key not in LAYOUT and not f"{key}.".startswith(_IGNORED)]
    # without the context of PathNames, paths are absolute
    settings = {**good_config.model_dump(mode="json"), "alarms": after.get("alarms", [])}
    recorded = {**bad_config.model_dump(mode="json"), "alarms": before.get("alarms", [])}
    for key in dict.fromkeys(find_unit(key, changed) for key in changed):
        value, other = _look_up(settings, key), _look_up(recorded, key)
        override = f"{key}={'' if value is None else toml_value(value)}"
        yield key, Candidate(label=key, change=f"{_shorten(other)} instead of {_shorten(value)}", overrides=(override,))


def find_unit(key: str, changed: Sequence[str]) -> str:
    """Return the outermost table that contains a changed key and must be replaced as a whole, because its kind changed,
    or only one of the configurations has it. Return the key if there is no such table."""
    parts = key.split(".")
    tables = (".".join(parts[:count]) for count in range(1, len(parts)))
    return next((table for table in tables if table in changed or f"{table}.kind" in changed), key)


def _look_up(settings: JsonValue, key: str) -> JsonValue:
    """Return the value of a dotted key, or None if it is missing."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def _shorten(value: JsonValue) -> str:
    if value is None:
        return "absent"
    if isinstance(value, Mapping) and "kind" in value:
        value = value["kind"]
    text = toml_value(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _find_iterations(good: Run, bad: Run) -> Iterator[Candidate]:
    before, after = (len(sealed_iterations(run)) for run in (good, bad))
    if before != after:
        yield Candidate(label="iterations", change=f"{after} instead of {before}", overrides=(f"iterations={before}",))


def _used_prompts(run: Run, inputs: RunInputs) -> dict[int, Prompt] | None:
    """Return the training prompts of a run by row number, without those that it excludes. Return None if the run does
    not store them."""
    excluded = run.excluded_rows(len(sealed_iterations(run)) + 1)
    prompts = inputs.prompts
    return None if prompts is None else {row: each for row, each in enumerate(prompts) if row not in excluded}


def _find_rows(
    good: str,
    prompts: tuple[dict[int, Prompt] | None, dict[int, Prompt] | None],
    inputs: RunInputs,
    config: RunConfig,
    num_ranges: int,
) -> Iterator[Candidate]:
    """Yield the training prompts that the better run did not use, in ranges of rows. `prompts` are those of the better
    and of the worse run, `inputs` and `config` those of the worse run."""
    before, after = prompts
    if before is None or after is None:
        return
    own = list(after)
    rows = [own[index] for index in find_new_rows(list(before.values()), list(after.values()))]
    sources = _find_sources(config, inputs.prompts or []) if rows else []
    for each in cut_rows(rows, num_ranges):
        places = [sources[row] for row in each] if sources else []
        label = format_sources(places) or f"training prompts in {format_rows(each)}, counted from 0"
        change = (
            f"not in {good}, or with another answer or other columns there{_format_dates(inputs.dependencies, places)}"
        )
        yield Candidate(label=label, change=change, rows=tuple(each))


def cut_rows(rows: Sequence[int], num_ranges: int) -> list[list[int]]:
    """Divide sorted row numbers into lists of about equal size. Longer ranges of consecutive rows are cut, and short
    ranges are put together with their neighbors."""
    size = ceil(len(rows) / num_ranges)
    pieces = list[list[int]]()
    for _, each in groupby(enumerate(rows), lambda row: row[1] - row[0]):
        span = [row for _, row in each]
        count = ceil(len(span) / size)
        edges = [len(span) * number // count for number in range(count + 1)]
        for start, end in pairwise(edges):
            if pieces and len(pieces[-1]) + end - start <= size:
                pieces[-1] += span[start:end]
            else:
                pieces.append(span[start:end])
    return pieces


def _find_sources(config: RunConfig, prompts: Sequence[Prompt]) -> list[str]:
    """Return the place of each training prompt in the files of a run, such as `problems.jsonl:17`. Return an empty list
    if the data comes from elsewhere, or the files do not contain exactly these prompts any more."""
    if not config.data.reading_reporter:
        return []
    try:
        problems = load_problems(config.data, "train", config.seed)
    except BadInput:
        return []
    is_same = [problem.answer for problem in problems] == [answer for _, answer, _ in prompts]
    return [problem.source for problem in problems] if is_same else []


def format_sources(sources: Iterable[str]) -> str:
    """Return places in files as text, such as "rows 311 to 340 of problems.jsonl". Return an empty text if the form of
    a place is unknown."""
    rows_by_file = dict[str, list[int]]()
    for source in sources:
        match = _PLACE.fullmatch(source)
        if match is None:
            return ""
        rows_by_file.setdefault(match["file"], []).append(int(match["number"]))
    return " and ".join(f"{format_rows(sorted(rows))} of {Path(name).name}" for name, rows in rows_by_file.items())


def _format_dates(dependencies: Dependencies | None, sources: Sequence[str]) -> str:
    """Return the dates of the last change of the files that contain these places, for the end of a description."""
    names = {Path(match["file"]).name for source in sources if (match := _PLACE.fullmatch(source)) is not None}
    times = [
        content.modified_ns
        for path, content in (dependencies.data if dependencies else {}).items()
        if Path(path).name in names
    ]
    dates = sorted({f"{datetime.fromtimestamp(time / 1e9, UTC):%Y-%m-%d}" for time in times})
    return f" (file changed on {', '.join(dates)})" if dates else ""


def _find_untested_prompts(
    names: tuple[str, str], prompts: tuple[dict[int, Prompt] | None, dict[int, Prompt] | None]
) -> Iterator[str]:
    before, after = prompts
    if before is None or after is None:
        name = names[0] if before is None else names[1]
        yield f"training prompts cannot be compared, because {name} does not store them"
        return
    ids, own = {prompt[0] for prompt in after.values()}, list(before)
    missing = [own[index] for index in find_new_rows(list(after.values()), list(before.values()))]
    missing = [row for row in missing if before[row][0] not in ids]
    if missing:
        count = format_count(len(missing), "training prompt")
        yield f"{count} only in {names[0]}: {format_rows(missing)}, counted from 0"


def _find_untested_dependencies(
    before: Dependencies, after: Dependencies, configs: tuple[RunConfig, RunConfig]
) -> list[str]:
    """Return one line for each difference of ranks, models of the Hub, data files other than those of the problems,
    whose prompts are compared, and libraries that `_describe_libraries` leaves out."""
    problems = {PathNames(config).name(path) for config in configs for path in paths_in(config.data)}
    files = [
        {name: content for name, content in each.data.items() if name.removesuffix("/*") not in problems}
        for each in (before, after)
    ]
    compared = find_libraries(before, *configs).keys() & find_libraries(after, *configs).keys()
    libraries = [
        {name: version for name, version in each.libraries.items() if name not in compared} for each in (before, after)
    ]
    changes = before.model_copy(update={"code": {}, "data": files[0], "libraries": libraries[0]}).changes(
        after.model_copy(update={"code": {}, "data": files[1], "libraries": libraries[1]})
    )
    commits = [
        f"{name}: commit {before.hub.get(name, 'none')[:8]} became {after.hub.get(name, 'none')[:8]}"
        for name in sorted({*before.hub, *after.hub})
        if before.hub.get(name) != after.hub.get(name)
    ]
    return [*changes, *commits]
