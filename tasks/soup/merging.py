"""Merging of policies: weighted sums of the weights of several policies, or other merges, written as one model
directory. Needs no Prefect."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue, ValidationError

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.hub import resolve_commit
from rheostat.infra.store.inputs import (
    HubPath,
    fetch_path,
    format_path,
    has_run,
    is_remote,
    read_model_path,
    recorded_base,
)
from rheostat.infra.validation_errors import explain
from rheostat.models.config.merging import (
    DareLinearMerge,
    DareTiesMerge,
    LinearMerge,
    MergeMethodConfig,
    SlerpMerge,
    TiesMerge,
)
from rheostat.models.config.promotion import CardConfig
from rheostat.models.records.merges import (
    MERGE,
    WEIGHTED_SUM,
    Adapters,
    Merge,
    MergedParent,
    MergeWork,
    MethodWithBase,
    Parent,
    start_of,
    start_of_run,
)
from rheostat.tasks.promotion.registry import describe_user, timestamp
from rheostat.tasks.run.hub_inputs import pin_base
from rheostat.tasks.run.target_sources import rheostat_version
from rheostat.tasks.views.card import CARD, merge_card
from rheostat.tasks.views.policy_export import new_directory, policy_after, write_in_process
from rheostat.tasks.views.runs import open_known_run

EXAMPLE: Final = "such as demo=0.7 longer@12=0.3"
MERGEKIT: Final = """\
# `mergekit-yaml THIS-FILE DIR` writes this weighted sum. To merge the models with another method, change this file:
#   ties         merge_method: ties, base_model: the common initial model, and density: 0.5 next to each weight
#   dare_ties    the same with merge_method: dare_ties (or dare_linear, without the election of signs)
#   slerp        merge_method: slerp for two models, base_model: the first one, parameters: {t: share of the second one}
# With ties and dare, weights apply to differences from base_model, which is not listed among the models itself.
# The result is in float32. Add out_dtype: bfloat16 to round it at the end."""
METHODS: Final[Mapping[str, type[MergeMethodConfig]]] = {
    each.model_fields["kind"].default: each
    for each in (LinearMerge, SlerpMerge, TiesMerge, DareLinearMerge, DareTiesMerge)
}
"""Settings class of each merge method, by kind."""
FACTORS: Final = (
    "--adapters factors is not supported, because the average of the factors A and of the factors B is not the sum of "
    "the adapters: their product also mixes A and B of different adapters. Use 'full', which adds the adapters to "
    "their bases, or 'ranks', which joins their ranks. Both are exact."
)


class MergedPolicy(Settings):
    """Model directory that was written as the merge of several policies."""

    path: str
    """Path of the directory, in Hugging Face format."""
    merge: Merge
    """Merged policies with their weights, and who merged them, as stored in the directory's merge.json."""

    def text(self) -> str:
        """Return the lines that `rheostat merge` prints: the directory, the method unless it is the weighted sum, and
        each merged policy with weight and digest."""
        parents = [_describe_parent(parent) for parent in self.merge.parents]
        kind = "adapter" if self.merge.adapters == "ranks" else "policy"
        if self.merge.is_weighted_sum:
            return "\n".join([f"{self.path}: {kind}, the sum of", *parents])
        method = ", ".join(f"{key} {value}" for key, value in self.merge.method.items())
        base = [] if self.merge.base is None else [f"{_describe_parent(self.merge.base)}  (base of the differences)"]
        return "\n".join([f"{self.path}: {kind}, the merge ({method}) of", *parents, *base])


def _describe_parent(parent: MergedParent) -> str:
    base = f"  (base model {parent.base})" if parent.base else ""
    return f"  {parent.weight:+g} × {parent.name}  {parent.digest[:16]}{base}"


def merge_policies(
    store: str,
    terms: Sequence[str],
    target: Path,
    *,
    dtype: Literal["float32", "bfloat16"] | None = None,
    adapters: Literal["full", "ranks", "factors"] = "full",
    unrelated: bool = False,
    method: MethodWithBase = WEIGHTED_SUM,
) -> MergedPolicy:
    """Merge policies, and write the result to a new directory. Each term is `NAME=WEIGHT`, in which NAME is a
    directory, a run, or a run after an iteration (`RUN@N`).

    Raises BadInput before the directory is created.
    """
    if adapters == "factors":
        raise BadInput(FACTORS)
    parents = weighted_parents(store, terms, method)
    return write_merged(parents, target, dtype=dtype, adapters=adapters, unrelated=unrelated, method=method)


def write_mergekit(store: str, terms: Sequence[str], target: Path) -> None:
    """Write a configuration with which mergekit computes the weighted sum of `NAME=WEIGHT` terms. Users can change it
    to another merge method there.

    Raises BadInput before the file is created.
    """
    if target.exists():
        raise BadInput(f"{target} already exists. Choose another file, or delete this one.")
    target.write_text(mergekit_page(weighted_parents(store, terms)))


def mergekit_page(parents: Sequence[Parent]) -> str:
    """Return a mergekit configuration (YAML) for the weighted sum of these policies in float32."""
    models = [(json.dumps(_mergekit_name(parent.path)), parent) for parent in parents]
    lines = [MERGEKIT, "merge_method: linear", "models:"]
    for name, parent in models:
        lines += [f"  - model: {name}  # {parent.name}", "    parameters:", f"      weight: {parent.weight!r}"]
    return "\n".join([*lines, "parameters:", "  normalize: false", "dtype: float32", ""])


def _mergekit_name(directory: Path) -> str:
    """Return the name of a policy in mergekit's syntax: its directory, or "base+adapter" if the directory contains an
    adapter."""
    settings = directory / "adapter_config.json"
    if not settings.is_file():
        return str(directory.resolve())
    if on_hub := recorded_base(directory):
        return f"{on_hub.partition('@')[0]}@{on_hub.rpartition('@')[2]}+{directory.resolve()}"
    base = directory / str(json.loads(settings.read_text())["base_model_name_or_path"])
    return f"{base.resolve()}+{directory.resolve()}"


def find_method(
    store: str, kind: str, *, base: str | None = None, options: Mapping[str, JsonValue] = {}
) -> MethodWithBase:
    """Return the merge method of a kind. `base` is the name of the base model of its task vectors, written like a
    policy to merge, and `options` are its other settings. Raises BadInput if a setting is missing, unknown or
    invalid."""
    settings_class = METHODS[kind]
    for name in (*options, *(["base"] if base is not None else [])):
        if name not in settings_class.model_fields:
            others = " or ".join(other for other, each in METHODS.items() if name in each.model_fields)
            raise BadInput(f"merge: --{name} has no meaning with --method {kind}. Remove it, or use --method {others}.")
    if base is None and "base" in settings_class.model_fields:
        raise BadInput(
            f"merge: --method {kind} merges differences from a base model, but there is no --base. Add --base NAME "
            "with the model from which the policies were trained, such as demo@0."
        )
    model = None if base is None else _find_parent(store, base, 1.0)
    try:
        settings = settings_class.model_validate({**options, **({} if model is None else {"base": str(model.path)})})
    except ValidationError as error:
        raise BadInput(f"merge: --method {kind}: {explain(error, settings_class)}") from error
    return MethodWithBase(settings, model)


def weighted_parents(store: str, terms: Sequence[str], method: MethodWithBase = WEIGHTED_SUM) -> tuple[Parent, ...]:
    """Resolve `NAME=WEIGHT` terms to policies with weights. Raises BadInput if a policy does not exist or the method
    does not allow the weights."""
    weighed = [_parse_term(term) for term in terms]
    if not weighed:
        raise BadInput(f"merge needs at least one policy with its weight, {EXAMPLE}.")
    if (reason := method.settings.find_weights_conflict([weight for _, weight in weighed])) is not None:
        raise BadInput(f"merge: {reason}")
    return tuple(_find_parent(store, name, weight) for name, weight in weighed)


def write_merged(
    parents: tuple[Parent, ...],
    target: Path,
    *,
    dtype: Literal["float32", "bfloat16"] | None = None,
    adapters: Adapters = "full",
    unrelated: bool = False,
    method: MethodWithBase = WEIGHTED_SUM,
    soup: JsonValue = None,
) -> MergedPolicy:
    """Write the merge of policies to a new directory, with merge.json and a model card. The directory appears only when
    it is complete."""
    with new_directory(target) as directory:
        work = MergeWork(parents, directory, dtype=dtype, adapters=adapters, unrelated=unrelated, method=method)
        write_in_process(work)
        recorded = Merge.model_validate_json((directory / MERGE).read_text())
        merge = recorded.model_copy(
            update={"who": describe_user(), "when": timestamp(), "version": rheostat_version(), "soup": soup}
        )
        (directory / MERGE).write_text(merge.text())
        (directory / CARD).write_text(merge_card(CardConfig(), title=target.name, merge=merge))
    return MergedPolicy(path=str(target), merge=merge)


def _parse_term(text: str) -> tuple[str, float]:
    """Parse `NAME=WEIGHT`. Raises BadInput if the text has another form or the weight is not finite."""
    name, _, number = text.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not name or not math.isfinite(weight):
        raise BadInput(f"merge: {text!r} must have the form NAME=WEIGHT, {EXAMPLE}.")
    return name, weight


def _find_parent(store: str, name: str, weight: float) -> Parent:
    """Find the policy to merge by its name: a directory, a model on the Hugging Face Hub, a run of the store, or a run
    after an iteration (`RUN@N`). The name of a model on the Hub gets its commit."""
    path = read_model_path(name)
    if isinstance(path, HubPath):
        address = path.address.pin(resolve_commit(path.address))
        directory = fetch_path(pin_base(path.with_address(address)))
        return Parent(f"{address.name}@{address.revision}", directory, weight)
    if is_remote(path) or path.is_dir():
        if has_run(path):
            raise BadInput(
                f"{format_path(path)} is the folder of a run. To merge its policy, write the name of the run, "
                f"{path.name}, and set --store to its store."
            )
        return Parent(name, fetch_path(pin_base(path)), weight, start_of(path))
    run_name, separator, number = name.partition("@")
    if separator and not number.isdecimal():
        raise BadInput(f"merge: {name!r} must have the number of an iteration after @, such as {run_name}@12.")
    run = open_known_run(store, run_name)
    _, policy = policy_after(run, int(number) if separator else None)
    base = fetch_bundle(run.store, policy.weights)
    directory = base if policy.adapter is None else fetch_bundle(run.store, policy.adapter)
    return Parent(name, directory, weight, start_of_run(run))
