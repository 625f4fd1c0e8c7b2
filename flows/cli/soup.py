"""Commands for merges of policies: merging, training a soup, showing its front, and exporting a policy of it."""

import json
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from rheostat.flows.cli.options import DEFAULT_STORE, Config, Named, Overrides, Store, StoredIn, log_progress
from rheostat.flows.cli.prefect_api import run_flow
from rheostat.flows.cli.runs import PICTURES, NewDirectory, NewFile
from rheostat.flows.cli.train import AcceptChange, JobArguments, open_job
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import Json, parse_whole_number, table, write

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rheostat.models.records.merges import MethodWithBase
    from rheostat.tasks.soup.record import SoupRecord

Terms = Annotated[
    str,
    Parameter(
        name="NAME=WEIGHT",
        help="policy (a directory, RUN, or RUN@N) and its weight; weights must sum to 1 for linear and slerp",
    ),
]
SumDtype = Annotated[
    Literal["float32", "bfloat16"] | None,
    Parameter(show_default="as in the parents", help="precision of the written weights"),
]
AdapterSum = Annotated[
    Literal["full", "ranks", "factors"],
    Parameter(
        help="result: full, a whole model; ranks, one adapter of adapters with the same base; factors is refused"
    ),
]
MergedTo = Annotated[NewDirectory | None, Parameter(metavar="DIR", show_default="none", help="directory to create")]
MergekitFile = Annotated[
    NewFile | None,
    Parameter(
        metavar="FILE",
        show_default="none",
        help="write the weighted sum as a YAML file for mergekit, with comments on other methods",
    ),
]
Unrelated = Annotated[bool, Parameter(help="allow policies of runs that started from different policies")]
SoupName = Annotated[str, Parameter(name="NAME", help="name of the soup")]
SoupNames = Annotated[str, Parameter(name="NAME", help="names of the soups, such as one for each seed")]
Preference = Annotated[
    str,
    Parameter(metavar="SHARES", help="share of each term, in the order of the terms; must sum to 1, such as 0.3,0.7"),
]
MethodOf = Annotated[
    Literal["bone", "direct", "rewarded", "oracle"] | None,
    Parameter(show_default="the only one", help="training method of the soup"),
]
FrontPicture = Annotated[
    NewFile | None, Parameter(metavar="FILE", show_default="no picture", help="picture to create, .svg or .png")
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of `rheostat merge` that determine the merged weights."""

    dtype: SumDtype = None
    adapters: AdapterSum = "full"
    unrelated: Unrelated = False
    method: Annotated[
        Literal["linear", "slerp", "ties", "dare_linear", "dare_ties"],
        Parameter(help="weighted sum, SLERP of two policies, or a method that merges differences from --base"),
    ] = "linear"
    base: Annotated[
        str | None,
        Parameter(metavar="NAME", show_default="none", help="model from which the policies were trained: ties, dare_*"),
    ] = None
    density: Annotated[
        float | None,
        Parameter(show_default="0.2 for ties, 0.5 for dare_*", help="fraction of the differences that are kept"),
    ] = None
    scale: Annotated[
        float | None, Parameter(show_default="1", help="factor by which ties multiplies the merged differences")
    ] = None
    seed: Annotated[
        int | None,
        Parameter(
            converter=parse_whole_number, show_default="0", help="seed of the random choice of differences by dare_*"
        ),
    ] = None

    def find_method(self, store: str) -> "MethodWithBase":
        """Return the merge method, with its base model from the store. Raises BadInput if options do not match."""
        from rheostat.tasks.soup import merging

        options = {"density": self.density, "scale": self.scale, "seed": self.seed}
        chosen = {name: value for name, value in options.items() if value is not None}
        return merging.find_method(store, self.method, base=self.base, options=chosen)


def merge(
    *terms: Terms,
    to: MergedTo = None,
    write_mergekit: MergekitFile = None,
    options: MergeOptions = MergeOptions(),
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Merge policies into one model directory, by their weighted sum or by SLERP, TIES or DARE."""
    from rheostat.tasks.soup import merging

    if to is None and write_mergekit is None:
        raise BadInput(
            "merge writes its result to --to DIR (the merged policy) or --write-mergekit FILE (a mergekit "
            "configuration). Add one of them."
        )
    method = options.find_method(store)
    if write_mergekit is not None:
        if options.method != "linear":
            raise BadInput(
                "merge: --write-mergekit writes the weighted sum (--method linear), and comments in the file show how "
                "to change the method. Leave out one of the two options."
            )
        merging.write_mergekit(store, terms, write_mergekit)
    if to is None:
        return
    merged = merging.merge_policies(
        store,
        terms,
        Path(to),
        dtype=options.dtype,
        adapters=options.adapters,
        unrelated=options.unrelated,
        method=method,
    )
    write(merged.model_dump_json(indent=2) if as_json else merged.text())


def soup(
    config: Config,
    /,
    *overrides: Overrides,
    run: Named = None,
    store: StoredIn = None,
    accept_change: AcceptChange = False,
    as_json: Json = False,
) -> None:
    """Train policies on different mixes of rewards, merge their weights for each preference, and evaluate the
    merges."""
    from rheostat.tasks.soup.parts import soup_settings

    job = JobArguments(config, overrides, run, store).load()
    soup_settings(job)
    log_progress(quiet=as_json)
    with open_job(job, "rheostat.flows.soup") as job:
        from rheostat.flows.soup import soup as soup_flow

        record = run_flow(soup_flow(job, accept_change=accept_change))
    _show([record], as_json=as_json)


def soup_front(*names: SoupNames, to: FrontPicture = None, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Show the rewards that a soup's policies reach at each preference, as a table and optionally as a plot."""
    from rheostat.tasks.soup.record import latest_records
    from rheostat.tasks.soup.views import draw_fronts

    if not names:
        raise BadInput("soup-front needs the name of at least one soup, such as `rheostat soup-front soup`.")
    records = [record for name in dict.fromkeys(names) for record in latest_records(store, name)]
    if to is not None:
        encoding = PICTURES.get(to.suffix.lower())
        if encoding is None:
            raise BadInput(f"--to {to} must end with .svg or .png.")
        if to.exists():
            raise BadInput(f"--to {to} already exists. Choose another file, or delete this one.")
        if len({record.terms for record in records}) > 1:
            raise BadInput(
                "soup-front: all soups must have the same reward terms to be plotted together. Plot each of them "
                "separately."
            )
        to.write_bytes(draw_fronts(records, encoding=encoding))
    _show(records, as_json=as_json)


def soup_policy(
    name: SoupName,
    /,
    *,
    preference: Preference,
    to: NewDirectory,
    method: MethodOf = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Write the merged policy for one preference between the rewards of a soup, as one model directory."""
    from rheostat.tasks.soup.record import soup_policy as write_policy

    try:
        shares = [float(share) for share in preference.split(",")]
    except ValueError:
        raise BadInput(f"--preference {preference!r} must be numbers separated by commas, such as 0.3,0.7.") from None
    merged = write_policy(store, name, shares, Path(to), method=method)
    write(merged.model_dump_json(indent=2) if as_json else merged.text())


def _show(records: "Sequence[SoupRecord]", *, as_json: bool) -> None:
    from rheostat.tasks.soup.views import front_rows, metric_row

    if as_json:
        write(json.dumps([record.model_dump(mode="json") for record in records], indent=2))
        return
    names = list(dict.fromkeys(record.name for record in records))
    for record in records if len(names) == 1 else ():
        write(f"\nsoup {record.name}, record {record.number}: {record.method}")
        if record.candidates:
            write("hypervolume after the search: " + ", ".join(f"β {b}: {v:.3f}" for b, v in record.candidates.items()))
        write(table([*front_rows(record)]))
    if len(names) == 1:
        write("\n" + table([dict(metric_row(record)) for record in records]))
        return
    by_method = groupby(sorted(records, key=attrgetter("method")), key=attrgetter("method"))
    write(table([{"soup": each.name, **metric_row(each)} for _, group in by_method for each in group]))
