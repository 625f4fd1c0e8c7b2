"""Records of merges: the merged policies, their weights, and the contents of merge.json. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import JsonValue

from rheostat.infra.config import Settings, Since
from rheostat.infra.store.inputs import Location, format_path, has_run, is_on_hub, is_remote
from rheostat.infra.store.runs import Run, open_run
from rheostat.models.config.merging import LinearMerge, MergeMethodConfig

MERGE: Final = "merge.json"
"""Name of the file in a merged policy's directory that records which policies (parents) were merged, and with which
weights."""
STARTS: Final = ("policy/initial", "policy/dpo", "policy/sft", "policy/base")
"""Keys of the manifests that may contain the policy from which a run's reinforcement learning starts, ordered from the
latest stage to the earliest. A run may skip the later stages."""

Adapters = Literal["full", "ranks"]


@dataclass(frozen=True, slots=True)
class Parent:
    """Policy to be merged, with its weight in the sum."""

    name: str
    """Name by which the user refers to the policy, such as a path or a run."""
    path: Location
    """Local directory of the policy's model or adapter, with the commit of the adapter's base model on the Hub."""
    weight: float
    start: str = ""
    """Digest of the policy from which the parent's run started, or an empty string if the parent does not come from a
    run."""


@dataclass(frozen=True, slots=True)
class MethodWithBase:
    """Merge method, with the base model that the method needs."""

    settings: MergeMethodConfig
    base: Parent | None = None
    """Model from which the differences of the policies are computed, with weight 1. None if the method needs none."""


WEIGHTED_SUM: Final = MethodWithBase(LinearMerge())
"""Default method of a merge."""


@dataclass(frozen=True, slots=True)
class MergeWork:
    """Request to merge policies and to write the result to one directory."""

    parents: tuple[Parent, ...]
    target: Path
    """Empty directory to which the merged policy is written."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the written weights. None keeps the precision of the merged policies' files."""
    adapters: Adapters = "full"
    """Kind of result. "full" writes a complete model. "ranks" combines adapters of the same base model into one
    adapter, whose rank is the sum of their ranks."""
    unrelated: bool = False
    """Whether policies are accepted that come from runs with different initial policies."""
    method: MethodWithBase = WEIGHTED_SUM


class MergedParent(Settings):
    """One of the policies that were merged, as recorded in merge.json."""

    name: str
    weight: float
    digest: str
    """Digest of the policy as recorded by runs. It covers the policy's files and, for an adapter, also its base
    model."""
    start: str
    """Digest of the policy from which the parent's run started, or an empty string if the parent does not come from a
    run."""
    base: Annotated[str, Since("0.2.0", before="")] = ""
    """Base model of an adapter on the Hugging Face Hub with its commit, `owner/name@commit`. Empty for complete models,
    and if the base model is a local directory."""


class Merge(Settings):
    """Contents of merge.json, which describes how a merged policy was made from its parents."""

    parents: tuple[MergedParent, ...]
    adapters: Adapters
    method: Annotated[dict[str, JsonValue], Since("0.2.0", before={"kind": "linear"})] = {"kind": "linear"}
    """Settings of the merge method, without the path of the base model."""
    base: Annotated[MergedParent | None, Since("0.2.0", before=None)] = None
    """Base model to which the merged differences of the parents were added, or None if the method needs none."""
    who: str = ""
    """User who requested the merge. Empty if a run merged the policies, because the run's manifest names the user."""
    when: str = ""
    """Time of the merge in UTC, in ISO format."""
    version: str = ""
    """Version of Rheostat that wrote merge.json."""
    soup: JsonValue = None
    """Preference, mixing weights and statistics if the merged policy is a soup (weighted average of policies trained on
    different rewards), else None."""

    @property
    def is_weighted_sum(self) -> bool:
        """Whether the merged policy is the weighted sum of its parents."""
        return self.method == {"kind": "linear"}

    def text(self) -> str:
        """Return the content of merge.json. Empty names of base models are omitted, and so are the method and the base
        model of a weighted sum."""
        document = self.model_dump(mode="json")
        for parent in (*document["parents"], *([document["base"]] if self.base else [])):
            if not parent["base"]:
                del parent["base"]
        if self.is_weighted_sum:
            del document["method"], document["base"]
        return json.dumps(document, indent=2, ensure_ascii=False)


def start_of(path: Path) -> str:
    """Return the digest of the initial policy of the run that contains a directory, or "" if the directory is not part
    of a run."""
    if is_on_hub(path):
        return ""
    place = path if is_remote(path) else path.resolve()
    home = next((parent for parent in place.parents if has_run(parent)), None)
    return "" if home is None else start_of_run(open_run(format_path(home.parent), home.name))


def start_of_run(run: Run) -> str:
    """Return the digest of the policy from which a run's reinforcement learning starts, or "" if the run has not
    created it yet."""
    start = next((manifest for key in STARTS if (manifest := run.find(key)) is not None), None)
    return "" if start is None else start.bundles["weights"].digest
