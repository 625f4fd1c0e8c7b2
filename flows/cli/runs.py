"""Commands that read runs. They import neither Prefect nor torch."""

import json
import shlex
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, Iteration, RunName, RunNames, Scores, Store, log_progress
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, fit_text, parse_whole_number, table, wrap_text, write

if TYPE_CHECKING:
    from rheostat.infra.store.numbered import NumberedRecords

Sort = Annotated[
    Literal["position", "reward", "length"],
    Parameter(help="order of generation, or highest reward or longest completion first"),
]
Shown = Annotated[
    int, Parameter(converter=parse_whole_number, metavar="N", help="maximum number of completions to show")
]
Newest = Annotated[
    int | None,
    Parameter(converter=parse_whole_number, metavar="N", show_default="all", help="list only the N newest runs"),
]
Sql = Annotated[
    str, Parameter(name="SQL", help="SQL query, such as 'select run, avg(reward) from rollouts group by run'")
]
NewDirectory = Annotated[Path, Parameter(metavar="DIR", help="directory to create")]
ImageDigest = Annotated[
    str, Parameter(name="DIGEST", help="digest of the image, or the beginning of it (see `rheostat rollouts`)")
]
NewFile = Annotated[Path, Parameter(metavar="FILE", help="file to create")]
Picture = Annotated[
    Path | None,
    Parameter(metavar="FILE", show_default="RUN.svg, which is overwritten", help="picture to create, .svg or .png"),
]
PICTURES: Final[dict[str, Literal["png", "svg"]]] = {".svg": "svg", ".png": "png"}
PolicyIteration = Annotated[
    int | None,
    Parameter(
        converter=parse_whole_number,
        metavar="N",
        show_default="the last one",
        help="iteration after which to export the policy; 0 is the initial policy",
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16"] | None,
    Parameter(show_default="float32 for a merged adapter, else as stored", help="precision of the weights"),
]
HubName = Annotated[
    str | None, Parameter(metavar="NAME", help="also push the policy to the Hugging Face Hub under this name")
]
From = Annotated[
    str, Parameter(name="FROM", help="store to copy from: a directory, s3://bucket/prefix or az://container/prefix")
]
To = Annotated[str, Parameter(name="TO", help="store to copy to")]
Stages = Annotated[
    bool, Parameter(help="print the measurements of every finished batch, as JSON for the placement simulator")
]
Verified = Annotated[str, Parameter(name="RUN", help="name of the run, registry or soup")]
Replays = Annotated[
    bool, Parameter(help="also replay stored episodes, and list the turns that new environments answer differently")
]
OPTIONAL_COLUMNS: Final = ("created", "took", "algorithm", "best", "accuracy before", "iterations")
"""Columns of the list of runs that are hidden if the terminal is too narrow. The first column is hidden first."""
EPISODES = 16
Episodes = Annotated[
    int | None,
    Parameter(
        converter=parse_whole_number,
        metavar="N",
        show_default=str(EPISODES),
        help="number of episodes to replay, selected by the run's seed",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Options of `rheostat rollouts` that control how images are shown."""

    opened: Annotated[
        bool, Parameter(name="--open", help="show the completions with their images on a page in the browser")
    ] = False
    sheet: Annotated[
        Path | None,
        Parameter(
            metavar="FILE", show_default="no sheet", help="also write the images, side by side, to a new PNG file"
        ),
    ] = None


TEXT_ONLY = ImageOptions()


def runs(*, limit: Newest = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """List the runs of a store."""
    from rheostat.infra.store.storage import open_store
    from rheostat.tasks.views.run_list import list_run_lines

    if limit is not None and limit < 1:
        raise BadInput(f"--limit is {limit}, but it must be at least 1.")
    listed, num_runs = list_run_lines(store, limit=limit)
    if as_json:
        write(json.dumps([run.model_dump() for run in listed], indent=2))
        return
    write(table([run.row() for run in listed], drop_first=OPTIONAL_COLUMNS) or f"no runs in {open_store(store).uri}")
    if len(listed) < num_runs:
        write(f"the newest {len(listed)} of {format_count(num_runs, 'run')}")


def show(run: RunName, /, *, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Show a run's iterations, metrics, digests and seconds per stage."""
    from rheostat.flows.cli.output import cost_lines, episode_lines, iteration_rows, term_lines, work_lines
    from rheostat.tasks.run.rescorings import describe_derived_results
    from rheostat.tasks.views.diagnosis import summarize_warnings
    from rheostat.tasks.views.runs import describe_run

    description = describe_run(store, run)
    if as_json:
        write(description.model_dump_json(indent=2))
        return
    origin = f", forked from {description.forked_from}" if description.forked_from else ""
    write(f"run {description.name}, created {description.created}, fingerprint {description.fingerprint}{origin}")
    for role, engines in description.engines.items():
        write(f"engine of {role}: {'; '.join(engines)}")
    for accuracy in description.evaluations:
        write(fit_text(f"held-out accuracy after iteration {accuracy.number}: {accuracy.line()}"))
    notes = [*term_lines(description), *episode_lines(description), *work_lines(description)]
    notes += cost_lines(description.costs)
    notes += [wrap_text(line) for line in summarize_warnings([report.warnings for report in description.iterations])]
    write("\n".join([table(iteration_rows(description)) or "no completed iteration yet", *notes]))
    if description.tags:
        write(f"tags {', '.join(description.tags)}")
    if description.deleted:
        write(f"rollouts, samples and policies deleted by {description.deleted.why} ({description.deleted.who})")
    for change in description.changes:
        write(f"changed from iteration {change.iteration} on: {'; '.join(change.changes)}")
    if description.policy:
        write(f"policy {description.policy}{describe_base_model(description.base)}")
    if description.base:
        write(f"export {export_command(run, store)}")
    if description.derived:
        write(describe_derived_results(description.derived))


def plot(*run: RunNames, to: Picture = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Plot the learning curves of one or more runs in one SVG or PNG file."""
    from rheostat.tasks.views.plots import curves_of, learning_curves
    from rheostat.tasks.views.runs import open_known_run

    if not run:
        raise BadInput("plot needs at least one RUN, such as `rheostat plot demo`.")
    target = to or Path(f"{'-'.join(run)}.svg")
    encoding = PICTURES.get(target.suffix.lower())
    if encoding is None:
        raise BadInput(f"--to {target} must end with .svg or .png.")
    if to is not None and to.exists():
        raise BadInput(f"--to {to} already exists. Choose another file, or delete this one.")
    picture = learning_curves([curves_of(open_known_run(store, name), others=run) for name in run], encoding=encoding)
    try:
        target.write_bytes(picture)
    except OSError as error:
        raise BadInput(f"{target} cannot be written: {error.strerror or error}. Choose another file.") from error
    write(json.dumps({"runs": run, "plot": str(target)}, indent=2) if as_json else str(target))


def watch(run: RunName, /, *, store: Store = DEFAULT_STORE) -> None:
    """Follow a run that another process trains, on this machine or elsewhere, until it ends."""
    from rheostat.flows.cli.live import watch_run
    from rheostat.tasks.views.runs import open_known_run

    open_known_run(store, run)
    watch_run(store, run)


def rollouts(
    run: RunName,
    /,
    *,
    iteration: Iteration = None,
    sort: Sort = "position",
    limit: Shown = 10,
    pictured: ImageOptions = TEXT_ONLY,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Show a run's prompts and completions with their rewards."""
    from rheostat.flows.cli.output import rollout_text
    from rheostat.tasks.views.pages import open_rollouts, write_sheet
    from rheostat.tasks.views.runs import open_known_run, read_rollouts

    if limit < 1:
        raise BadInput(f"--limit is {limit}, but it must be at least 1.")
    samples = read_rollouts(store, run, iteration=iteration, order=sort, limit=limit)
    if pictured.sheet is not None:
        write_sheet(open_known_run(store, run), samples, pictured.sheet)
    if as_json:
        write(json.dumps([sample.model_dump() for sample in samples], indent=2, ensure_ascii=False))
        return
    if pictured.opened:
        write(str(open_rollouts(open_known_run(store, run), samples)))
        return
    for sample in samples:
        write(rollout_text(sample), is_styled=True)
    if pictured.sheet is not None:
        write(str(pictured.sheet))


def media(
    run: RunName, digest: ImageDigest, /, *, to: NewFile, store: Store = DEFAULT_STORE, as_json: Json = False
) -> None:
    """Write an image of a run's prompts, or a picture that its policy generated, to a file."""
    from rheostat.tasks.views.runs import open_known_run, write_image

    image = write_image(open_known_run(store, run), digest, to)
    text = f"{to}: {image.format} {image.width} x {image.height}, {image.bytes:,} bytes, {image.digest}"
    write(image.model_dump_json(indent=2) if as_json else text)


def export(run: RunName, /, *, scores: Scores = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Export a run's sealed iterations to Parquet, and print the paths."""
    from rheostat.tasks.views.export import export_run

    paths = export_run(store, run, scores=scores)
    write(json.dumps(paths, indent=2) if as_json else "\n".join(paths))


def query(sql: Sql, /, *run: RunNames, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Query runs in SQL (DuckDB): tables `rollouts`, `scores`, `samples`, `iterations` and `policies`."""
    from rheostat.flows.cli.output import answer_rows
    from rheostat.tasks.views.query import query_runs

    if not sql.strip():
        raise BadInput("query needs a SQL statement, such as 'select count(*) from rollouts'.")
    answer = query_runs(store, sql, names=run).to_pylist()
    if as_json:
        write(json.dumps(answer, indent=2, ensure_ascii=False, default=_encode_value))
    else:
        write(table(answer_rows(answer)) or "no rows")


def _encode_value(value: object) -> int | float | str:
    """Convert a value of a SQL result for JSON. Sums of integers arrive as decimals, and become integers again."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


def export_policy(
    run: RunName,
    /,
    *,
    to: NewDirectory,
    iteration: PolicyIteration = None,
    dtype: Dtype = None,
    push: HubName = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Export a run's policy as one model directory, with adapters merged into their base."""
    from rheostat.tasks.views.policy_export import export_policy as write_policy
    from rheostat.tasks.views.policy_export import hub_token, push_policy
    from rheostat.tasks.views.runs import open_known_run

    opened = open_known_run(store, run)
    token = hub_token(push) if push else ""
    exported = write_policy(opened, to, iteration=iteration, dtype=dtype)
    exported = push_policy(exported, push, token=token) if push else exported
    merged = ", base and adapter merged" if exported.merged else ""
    pushed = f"\npushed to {exported.pushed}" if exported.pushed else ""
    text = f"{exported.path}: policy {exported.iteration} of run {exported.run}{merged}{pushed}"
    write(exported.model_dump_json(indent=2) if as_json else text)


def verify(
    run: Verified,
    /,
    *,
    environment: Replays = False,
    episodes: Episodes = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> int:
    """Verify every digest and invariant of a run, or every record of a registry or soup, by its name."""
    from rheostat.flows.cli.output import deletion_lines
    from rheostat.infra.store.registry import open_registry, registries
    from rheostat.infra.store.runs import list_runs
    from rheostat.infra.store.verify import verify_registry
    from rheostat.tasks.soup.record import list_soups, soup_records, verify_soup
    from rheostat.tasks.verification.episodes import check_environment
    from rheostat.tasks.verification.invariants import deletions, ignored_files, missing_states, verify_run
    from rheostat.tasks.views.runs import open_known_run

    if episodes is not None and not environment:
        raise BadInput(f"--episodes {episodes} needs --environment. Add --environment, or remove --episodes.")
    if episodes is not None and episodes < 1:
        raise BadInput(f"--episodes is {episodes}, but must be at least 1.")
    if not environment and run not in list_runs(store):
        if run in registries(store):
            registry = open_registry(store, run)
            return _report_records("registry", run, verify_registry(registry), registry.numbered, as_json=as_json)
        if run in list_soups(store):
            return _report_records("soup", run, verify_soup(store, run), soup_records(store, run), as_json=as_json)
    problems, ignored = verify_run(store, run), ignored_files(store, run)
    again, deleted = ([], []) if problems else (missing_states(store, run), deletions(store, run))
    environment_check = None
    if environment and not problems:
        environment_check = check_environment(open_known_run(store, run), episodes=episodes or EPISODES)
    differs = environment_check is not None and bool(environment_check.differences)
    if as_json:
        document = {"run": run, "ok": not (problems or differs), "problems": problems, "ignored": ignored}
        document |= {"learnt_again": again, "deleted": [stone.model_dump() for stone in deleted]}
        document |= {} if environment_check is None else {"environment": environment_check.model_dump()}
        write(json.dumps(document, indent=2))
    else:
        lines = problems or [f"run {run}: every digest and every invariant holds"]
        lines += [] if environment_check is None else environment_check.lines()
        lines += deletion_lines(deleted)
        lines += [f"ignored {name}: this file does not belong to the run" for name in ignored]
        lines += [
            f"{state} is missing: training will compute the newest version's optimizer state again" for state in again
        ]
        write("\n".join(lines))
    return 1 if problems or differs else 0


def _report_records(
    kind: Literal["registry", "soup"], name: str, problems: list[str], numbered: "NumberedRecords", *, as_json: bool
) -> int:
    """Print whether the records of a registry or soup are valid, and return the exit code."""
    unprotected = 0 if problems else numbered.unprotected()
    if as_json:
        document = {kind: name, "ok": not problems, "problems": problems, "unprotected": unprotected}
        write(json.dumps(document, indent=2))
    else:
        write("\n".join(problems or [f"{kind} {name}: every record and every digest holds"]))
    if unprotected and not as_json:
        write(
            f"record {unprotected} is not protected yet: no entry of the chain names it, so its loss would not be "
            "noticed. The next record adds this entry."
        )
    return 1 if problems else 0


def copy(run: RunName, source: From, target: To, /, *, as_json: Json = False) -> int:
    """Copy a run to another store and verify the copy, or continue an interrupted copy."""
    from rheostat.infra.store.copies import copy_run
    from rheostat.tasks.verification.invariants import verify_run
    from rheostat.tasks.views.runs import open_known_run

    log_progress(quiet=as_json)
    open_known_run(source, run)
    copied = copy_run(run, source, target)
    problems = verify_run(target, run)
    if as_json:
        document = {"run": run, "store": copied.run.store.uri, "objects": copied.objects, "bytes": copied.bytes}
        write(json.dumps({**document, "found": copied.found, "ok": not problems, "problems": problems}, indent=2))
    else:
        objects = format_count(copied.objects, "object")
        size = f"{objects}, {copied.bytes / 1e6:,.1f} MB, of which {copied.found:,} existed already"
        success = "every digest and every invariant holds"
        write("\n".join([f"run {run} in {copied.run.store.uri}: {size}", *(problems or [success])]))
    return 1 if problems else 0


def placement(run: RunName, /, *, stages: Stages = False, store: Store = DEFAULT_STORE, as_json: Json = False) -> int:
    """Show which roles got a run's worker slots and why, and check each decision by computing it again."""
    from rheostat.flows.cli.output import decision_text
    from rheostat.tasks.views.placement import measured_run, replay_run

    if stages:
        write(measured_run(store, run).model_dump_json(indent=2))
        return 0
    lines = replay_run(store, run)
    if as_json:
        write(json.dumps([line.model_dump() for line in lines], indent=2))
    else:
        nothing = f"run {run}: no placement decision yet. Roles share workers only if reward models need worker slots."
        write(decision_text(lines) or nothing)
    return 0 if all(line.replayed for line in lines) else 1


def describe_base_model(base: str | None) -> str:
    """Return a line that names the base model if the policy is an adapter, otherwise an empty string."""
    return "" if base is None else f"\n         adapter for the base model {base}"


def export_command(run: str, store: str) -> str:
    """Return the command that merges an adapter and its base into one model directory, with an explanation."""
    command = ["rheostat", "export-policy", run, "--to", f"{run}-policy"]
    merged = shlex.join(command + (["--store", store] if store != DEFAULT_STORE else []))
    return f"{merged}    merges base and adapter into one model directory"
