"""Commands that delete unneeded objects and users' data. Without `--delete` the commands only list what they would
delete."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, RunName, Store
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, Damaged, RunLocked
from rheostat.infra.terminal import Json, parse_whole_number, table, write
from rheostat.infra.user_files import read_text_file

if TYPE_CHECKING:
    from rheostat.infra.store.contracts import Entry
    from rheostat.infra.store.garbage import Rules
    from rheostat.tasks.forgetting import Forgotten

OlderThan = Annotated[
    str | None,
    Parameter(metavar="30d", help="delete runs whose last commit is older than this: a number with m, h, d or w"),
]
Keep = Annotated[
    int | None, Parameter(converter=parse_whole_number, metavar="N", help="never delete the N newest runs")
]
Tags = Annotated[tuple[str, ...], Parameter(name="--tag", metavar="TAG", help="never delete runs that have this tag")]
PromptIds = Annotated[
    Path, Parameter(metavar="FILE", help="file with one prompt_id per line, as in rollouts and exports")
]
Delete = Annotated[bool, Parameter(help="delete; without this option nothing is deleted")]


@dataclass(frozen=True, slots=True)
class Kind:
    """Number and total size of the objects in one folder of a run that were deleted, or would be deleted."""

    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Collected:
    """Result of `rheostat gc` for one run: the objects that were deleted, or that --delete would delete."""

    run: str
    """Name of the run."""
    given_up: bool = False
    """Whether the rules select the whole run, because of its age or its position among the newest runs. In this case
    all its rollouts, samples and policies are deleted."""
    deleted: bool = False
    """Whether the objects were deleted and not only listed."""
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Number and size of the deleted objects. Keys are names of the folders that contain the objects."""
    skipped: str = ""
    """Reason why the run was skipped, or an empty string."""
    is_damaged: bool = False
    """Whether the run was skipped because it is damaged or cannot be read."""


def gc(
    *runs: RunName,
    older_than: OlderThan = None,
    keep: Keep = None,
    tag: Tags = (),
    delete: Delete = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> int:
    """Delete files that no run needs, and whole runs by age, number and tag. Without --delete, only list them."""
    from rheostat.infra.store.garbage import folders_without_record, select_runs
    from rheostat.infra.store.registry import REGISTRIES
    from rheostat.infra.store.runs import list_runs
    from rheostat.models.config.retriever import RETRIEVERS
    from rheostat.models.config.soup import SOUPS
    from rheostat.tasks.views.runs import open_known_run

    names = [open_known_run(store, name).name for name in runs] or list_runs(store)
    rules = _parse_rules(store, older_than, keep, tag)
    ended_runs = select_runs(store, names, rules)
    collected = [_collect(store, name, rules, ended_runs.get(name), delete=delete) for name in names]
    if not runs:
        reserved = {REGISTRIES, RETRIEVERS, SOUPS}
        collected += [
            Collected(run=name, skipped=_describe_without_record(entries))
            for name, entries in folders_without_record(store, reserved=reserved).items()
        ]
    if as_json:
        write(json.dumps([asdict(each) for each in collected], indent=2))
    else:
        write("\n".join(_describe_collected(collected, rules, delete=delete)))
    return 1 if any(each.is_damaged for each in collected) else 0


def _describe_collected(collected: list[Collected], rules: "Rules", *, delete: bool) -> list[str]:
    rows = [
        {"run": each.run, "what": kind, "objects": f"{part.objects:,}", "MB": f"{part.bytes / 1e6:,.1f}"}
        for each in collected
        for kind, part in each.kinds.items()
    ]
    note = f"selected by {rules}; its record, manifests, reports and exports are kept"
    lines = [table(rows)] if rows else ["nothing to delete"]
    lines += [f"run {each.run}: {note}" for each in collected if each.given_up]
    lines += [f"run {each.run}: skipped: {each.skipped}" for each in collected if each.skipped]
    return lines + (["Nothing was deleted. Add --delete to delete."] if rows and not delete else [])


def _describe_without_record(entries: "Sequence[Entry]") -> str:
    size = sum(entry.bytes for entry in entries) / 1e6
    return (
        f"its run.json is missing, but {format_count(len(entries), 'file')} ({size:,.1f} MB) of it remain. If you "
        "deleted the run, a process of the run wrote these files later: delete the folder again. Otherwise, restore "
        "run.json from a copy."
    )


def _collect(store: str, name: str, rules: "Rules", ended: datetime | None, *, delete: bool) -> Collected:
    """Find the unneeded objects of a run, and delete them if `delete` is true. `ended` is the time of the run's last
    commit if the rules select the whole run for deletion, otherwise None."""
    from rheostat.infra.store.garbage import collect_garbage, delete_run, find_garbage, last_commit
    from rheostat.infra.store.runs import open_run

    try:
        run = open_run(store, name)
        with run.lock_without_epoch():
            garbage = find_garbage(run, whole_run=ended is not None)
        if delete and (garbage or ended):
            with run.lock():
                if ended is None or last_commit(run) > ended:  # the run has continued meanwhile
                    garbage, ended = collect_garbage(run), None
                else:
                    garbage = delete_run(run, why=str(rules))
    except (BadInput, Damaged) as error:  # locked, damaged, or written by a newer Rheostat
        return Collected(run=name, skipped=str(error), is_damaged=not isinstance(error, RunLocked))
    kinds = {
        kind: Kind(objects=len(entries), bytes=sum(entry.bytes for entry in entries))
        for kind, entries in garbage.items()
    }
    return Collected(run=name, given_up=ended is not None, deleted=delete, kinds=kinds)


def _parse_rules(store: str, older_than: str | None, keep: int | None, tags: tuple[str, ...]) -> "Rules":
    from rheostat.infra.store.garbage import Rules, readable_runs, tags_of
    from rheostat.infra.validation_errors import nearest

    if keep is not None and keep < 0:
        raise BadInput(f"--keep is {keep}, but it must be at least 0.")
    rules = Rules(None if older_than is None else _parse_age(older_than), keep, frozenset(tags))
    if tags and rules.is_empty:
        raise BadInput(
            "--tag protects runs from deletion by --older-than or --keep, so it needs one of these options. Add one."
        )
    known = sorted({tag for run in readable_runs(store) for tag in tags_of(run)}) if tags else []
    for tag in tags:
        if tag not in known:
            raise BadInput(
                f"--tag {tag!r}: no run of the store has this tag. Existing tags: "
                f"{', '.join(known) or 'none'}{nearest(tag, known)}"
            )
    return rules


_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _parse_age(text: str) -> timedelta:
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)([mhdw])", text)
    if match is None:
        raise BadInput(
            f"--older-than {text!r} must be a number followed by m (minutes), h (hours), d (days) or w (weeks), such "
            "as 30d."
        )
    return timedelta(**{_UNITS[match[2]]: float(match[1])})


def forget(
    *runs: RunName,
    prompt_ids: PromptIds,
    delete: Delete = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """List, or with --delete remove, every copy of the given prompts and their completions in the named runs, in all
    runs that share rollouts with them, or in all runs if none is named."""
    from rheostat.infra.store.runs import list_runs
    from rheostat.tasks.forgetting import remove_everywhere
    from rheostat.tasks.lineage.learners import find_trained_policies
    from rheostat.tasks.views.runs import open_known_run

    ids = read_ids(prompt_ids)
    names = [open_known_run(store, name).name for name in runs] or list_runs(store)
    reports = remove_everywhere(store, names, ids, delete=delete)
    if not any(each.prompts or each.exports for each in reports):
        where = f"run {names[0]!r}" if len(names) == 1 else f"{len(names)} runs"
        raise BadInput(f"{prompt_ids} contains no prompt_id of a prompt in {where}. Check the ids and --store.")
    if delete:
        _forget_samples([each.run for each in reports if each.prompts])
    if as_json:
        write(json.dumps([each.model_dump() for each in reports], indent=2))
    else:
        write(
            "\n".join(
                [
                    *_describe(reports, len(ids), delete=delete),
                    *(each.line() for each in find_trained_policies(store, ids)),
                ]
            )
        )


def _describe(reports: "Sequence[Forgotten]", num_prompts: int, *, delete: bool) -> Iterator[str]:
    for each in reports:
        rows, shards = format_count(each.rows, "row"), format_count(each.shards, "shard")
        what = f"{rows} of {shards}, {format_count(each.exports, 'export')}"
        outcome = "were emptied" if delete else "would be emptied"
        yield f"run {each.run}: {each.prompts} of {format_count(num_prompts, 'prompt')} found; {what} {outcome}"
    data = sorted({path for each in reports if each.prompts for path in each.data})
    yield from (f"not changed, remove the prompts yourself: {path}" for path in data)
    others = "policies trained on the prompts, copies of runs, samples in trackers, caches on other machines"
    yield f"not changed: {others}"
    if not delete:
        yield "Nothing was deleted. Add --delete to delete."


def read_ids(path: Path) -> frozenset[str]:
    try:
        text = read_text_file(path, label=f"--prompt-ids {path}")
    except FileNotFoundError:
        raise BadInput(
            f"--prompt-ids {path}: there is no such file. Name a file with one prompt_id per line."
        ) from None
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, start=1):
        if line and not re.fullmatch(r"[0-9a-f]{16}", line):
            raise BadInput(
                f"{path}, line {number}: a prompt_id has 16 digits (0-9 a-f), found {line[:40]!r}. Write one "
                "prompt_id per line."
            )
    if not any(lines):
        raise BadInput(f"--prompt-ids {path}: the file contains no prompt_id. Write one prompt_id per line.")
    return frozenset(line for line in lines if line)


def _forget_samples(runs: Sequence[str]) -> None:
    """Delete the published tables and pages in Prefect that contain completions of these runs."""
    from rheostat.flows.cli.prefect_api import prefect_api

    with prefect_api():
        from rheostat.tasks.reporting import delete_published_completions

        for run in runs:
            asyncio.run(delete_published_completions(run))
