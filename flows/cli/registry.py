"""Commands for the versions of a policy in a registry: retraining, promotion and rollback."""

import asyncio
import json
import shlex
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, Config, Overrides, Store, StoredIn, log_progress
from rheostat.flows.cli.prefect_api import configured_api, run_flow
from rheostat.flows.cli.train import AcceptChange, JobArguments, open_job
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, parse_whole_number, table, write, write_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rheostat.infra.store.registry import RegistryRecord
    from rheostat.tasks.config.run import RunConfig
    from rheostat.tasks.promotion.promote import Retrained

Times = Annotated[
    int,
    Parameter(
        converter=parse_whole_number,
        metavar="N",
        help="number of retrains, one for each week. From the second on, each applies its list of repeat_overrides",
    ),
]
Day = Annotated[
    str | None, Parameter(metavar="YYYY-MM-DD", show_default="today, in UTC", help="day in the name of the run")
]
New = Annotated[bool, Parameter(name="--new", help="begin today's retrain even if an earlier one is not finished")]
RegistryName = Annotated[str, Parameter(name="NAME", help="name of the registry")]
AnyRegistry = Annotated[
    str | None, Parameter(name="NAME", show_default="all of the store", help="name of the registry")
]
ProposedRun = Annotated[str, Parameter(name="RUN", help="name of the run that proposed its policy")]
To = Annotated[
    int | None,
    Parameter(
        converter=parse_whole_number,
        metavar="N",
        show_default="the champion before the last promotion",
        help="number of the record whose policy becomes champion",
    ),
]
MirrorAddress = Annotated[
    str | None, Parameter(metavar="URI", show_default="MLFLOW_REGISTRY_URI", help="address of MLflow's registry")
]
Reason = Annotated[str, Parameter(metavar="TEXT", help="reason, which is stored in the record")]

SHOWN = 100
"""Maximum number of characters of a registry record's reason in a table. Longer reasons are cut off."""


def retrain(
    config: Config,
    /,
    *overrides: Overrides,
    times: Times = 1,
    day: Day = None,
    is_new: New = False,
    store: StoredIn = None,
    accept_change: AcceptChange = False,
    as_json: Json = False,
) -> None:
    """Retrain the champion on new data as a run named after the day, and promote the new policy if it is better."""
    from rheostat.tasks.config.documents import place_overrides

    if times < 1:
        raise BadInput(f"--times is {times}, but it must be at least 1.")
    if is_new and day is not None:
        raise BadInput(
            f"--new starts the retrain of today, but --day {day} selects another day. Use only one of the two."
        )
    first = _day(day)
    if times - 1 > (date.max - first).days // 7:
        raise BadInput(
            f"--times {times} is too high, because the last week would be after {date.max}. Lower --times, or choose "
            "an earlier --day."
        )
    first_job = JobArguments(config, overrides, None, store).load()
    if day is None and not is_new:
        require_finished(first_job, today=first)
    repeat_overrides = [*first_job.repeat_overrides, *((),) * times][: times - 1]
    placed_overrides = (place_overrides(changed, config.parent, job=config.parent) for changed in repeat_overrides)
    jobs = [
        first_job,
        *(JobArguments(config, (*overrides, *changed), None, store).load() for changed in placed_overrides),
    ]
    log_progress(quiet=as_json)
    results = [
        retrain_here(job, day=first + timedelta(weeks=week), accept_change=accept_change)
        for week, job in enumerate(jobs)
    ]
    if as_json:
        write(json.dumps([each.model_dump(mode="json") for each in results], indent=2))
    else:
        write("\n" + "\n\n".join(_describe_retrain(each, job) for each, job in zip(results, jobs, strict=True)))


def require_finished(config: "RunConfig", *, today: date) -> None:
    """Raise BadInput if an earlier scheduled retrain is not finished. Starting a new retrain would abandon the earlier
    one. `today` is the current date in UTC."""
    from rheostat.tasks.promotion.draft import find_unfinished, with_date

    if (day := find_unfinished(config, today)) is not None:
        raise BadInput(
            f"The retrain {with_date(config, day).name} of {day} is not finished, and today is {today} (UTC). "
            f"Continue it with --day {day}, or start the retrain of today with --new."
        )


def retrain_here(config: "RunConfig", *, day: date, accept_change: bool = False) -> "Retrained":
    """Run one retrain of the configured job in this process, and return the result. `day` is the date in the name of
    the run. Raises BadInput before anything is written or started if an input is invalid."""
    with open_job(config, "rheostat.flows.retrain") as config:
        from rheostat.flows.retrain import retrain as retrain_flow

        return run_flow(retrain_flow(config, accept_change=accept_change, day=day))


def gate(config: Config, /, *overrides: Overrides, store: StoredIn = None, as_json: Json = False) -> None:
    """Show the smallest gain that the promotion gate can detect with its suites, and how many problems it needs."""
    from rheostat.tasks.promotion.power import gate_power

    job = JobArguments(config, overrides, None, store).load()
    if job.promotion is None:
        raise BadInput(
            f"{config} has no table [promotion], which contains the rules for comparing a retrained policy with the "
            "champion. Add this table."
        )
    powers = asyncio.run(gate_power(job))
    if as_json:
        write(json.dumps([power.model_dump(mode="json") for power in powers], indent=2))
    else:
        write("\n".join(power.text() for power in powers))


def registry(name: AnyRegistry = None, /, *, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """List the recorded decisions about the versions of a policy, such as promotions and rollbacks, with their
    reasons."""
    from rheostat.infra.store.registry import open_existing_registry, registries

    names = registries(store) if name is None else [name]
    records_by_name = {each: open_existing_registry(store, each).records() for each in names}
    if as_json:
        document = {
            each: [record.model_dump(mode="json") for record in records] for each, records in records_by_name.items()
        }
        write(json.dumps(document, indent=2))
    elif not records_by_name:
        write(f"There is no registry in {store}. `rheostat retrain` creates the one that promotion.registry names.")
    else:
        write(
            "\n\n".join(
                f"{each}\n{table(_build_rows(records), drop_first=('who', 'policy', 'when', 'reason'))}"
                for each, records in records_by_name.items()
            )
        )


def promote(
    name: RegistryName, run: ProposedRun, /, *, reason: Reason, store: Store = DEFAULT_STORE, as_json: Json = False
) -> None:
    """Approve a proposed policy, so that it becomes the champion (for promotion.approve = "manual")."""
    from rheostat.tasks.promotion.registry import promote as sign

    _report_record(store, name, *sign(store, name, run, reason=reason), as_json=as_json)


def refuse(
    name: RegistryName, run: ProposedRun, /, *, reason: Reason, store: Store = DEFAULT_STORE, as_json: Json = False
) -> None:
    """Refuse a proposed policy. The proposal can then no longer be signed, and the champion does not change."""
    from rheostat.tasks.promotion.registry import refuse as turn_down

    record, is_new = turn_down(store, name, run, reason=reason)
    _report_record(store, name, record, is_new, f"the proposal of {run} is refused", as_json=as_json)


def rollback(
    name: RegistryName, /, *, reason: Reason, to: To = None, store: Store = DEFAULT_STORE, as_json: Json = False
) -> None:
    """Make an earlier champion the champion again, immediately and without an evaluation."""
    from rheostat.tasks.promotion.registry import rollback as take_back

    _report_record(store, name, *take_back(store, name, to=to, reason=reason), as_json=as_json)


def mirror(name: RegistryName, /, *, to: MirrorAddress = None, store: Store = DEFAULT_STORE) -> None:
    """Copy the state of a registry to the model registry of MLflow.

    If MLFLOW_REGISTRY_URI is set, promotions and rollbacks do this automatically.
    """
    from rheostat.infra.store.registry import open_existing_registry
    from rheostat.tasks.promotion.mirror import ADDRESS_VARIABLE, mirror_address
    from rheostat.tasks.promotion.mirror import sync_to_mlflow as write_mirror

    registry = open_existing_registry(store, name)
    if (address := to or mirror_address()) is None:
        raise BadInput(
            f"The address of MLflow's registry is missing. Set --to URI or {ADDRESS_VARIABLE}, for example to sqlite:///mlflow.db."
        )
    write(f"MLflow's registry: {write_mirror(registry, address)}")


def _describe_retrain(result: "Retrained", job: "RunConfig") -> str:
    """Describe the result of a retrain as text. If the result is a proposal that a person must sign, the text contains
    the command that signs it."""
    record, rules, lines = result.record, job.promotion, [result.text()]
    if record is not None and rules is not None and record.kind == "proposal":
        command = ["rheostat", "promote", rules.registry, record.run, "--reason", "TEXT"]
        lines.append(f"sign     {shlex.join(command + (['--store', job.store] if job.store != DEFAULT_STORE else []))}")
    return "\n".join(lines)


def _report_record(
    store: str, name: str, record: "RegistryRecord", is_new: bool, what: str = "", *, as_json: bool
) -> None:
    """Print what a registry record changed, and report a new record to Prefect and MLflow. `what` describes the change.
    By default the text says that the policy became the champion."""
    if as_json:
        write(json.dumps({"record": record.model_dump(mode="json"), "is_new": is_new}, indent=2))
    else:
        reference = f"record {record.number}" if is_new else f"unchanged since record {record.number}"
        write(f"registry {name}: {what or f'champion is {record.policy[:16]} of run {record.run}'} ({reference})")
    if is_new:
        _report_to_prefect(name, record)
    _sync_mirror(store, name)


def _report_to_prefect(name: str, record: "RegistryRecord") -> None:
    """Report a new registry record to Prefect if a Prefect API is configured. A failure is printed as a warning."""
    with configured_api() as url:
        if url is None:
            return
        from rheostat.tasks.events import send_record

        if (problem := send_record(name, record)) is not None:
            write_error(f"warning: record {record.number} was not reported to the Prefect API at {url}: {problem}")


def _sync_mirror(store: str, name: str) -> None:
    """Update the copy of a registry in MLflow if the address of MLflow's registry is set. A failure is printed as a
    warning."""
    from rheostat.infra.store.registry import open_registry
    from rheostat.tasks.promotion.mirror import mirror_address, try_sync_to_mlflow

    address = mirror_address()
    if address is not None and (problem := try_sync_to_mlflow(open_registry(store, name), address)) is not None:
        write_error(f"warning: registry {name} is not synced to MLflow yet: {problem}")


def _build_rows(records: "Sequence[RegistryRecord]") -> list[dict[str, str]]:
    from rheostat.infra.store.registry import champion_of

    champion = champion_of(records)
    return [
        {
            "record": f"{record.number}{' *' if record == champion else ''}",
            "kind": record.kind,
            "policy": record.policy[:16],
            "run": record.run,
            "when": record.when,
            "who": record.who,
            "reason": record.reason if len(record.reason) <= SHOWN else f"{record.reason[: SHOWN - 1]}…",
        }
        for record in records
    ]


def _day(text: str | None) -> date:
    if text is None:
        return datetime.now(UTC).date()
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise BadInput(f"--day {text!r} is not a valid date. Write it like 2026-11-23.") from None
