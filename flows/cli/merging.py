"""Commands about weighted sums of policies; they load neither Prefect nor torch."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from flows.cli.options import DEFAULT_STORE, Store
from flows.cli.runs import NewDirectory
from infra.terminal import Json, write

Terms = Annotated[
    str,
    Parameter(
        name="NAME=WEIGHT",
        help="policies and their weights, which sum to 1: a directory, RUN, or RUN@N after N iterations",
    ),
]
SumDtype = Annotated[
    Literal["float32", "bfloat16"] | None, Parameter(show_default="the parents'", help="of the written weights")
]
AdapterSum = Annotated[
    Literal["full", "ranks", "factors"],
    Parameter(
        help="write a whole model, or of adapters over one base an adapter of all ranks; factors are never averaged"
    ),
]
Unrelated = Annotated[bool, Parameter(help="also merge policies of runs that did not start from one policy")]


def merge(
    *terms: Terms,
    to: NewDirectory,
    dtype: SumDtype = None,
    adapters: AdapterSum = "full",
    unrelated: Unrelated = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Write the weighted sum of policies as one model directory; negative weights are meant."""
    from tasks.soup.merging import merge_policies

    made = merge_policies(store, terms, Path(to), dtype=dtype, adapters=adapters, unrelated=unrelated)
    write(made.model_dump_json(indent=2) if as_json else made.text())
