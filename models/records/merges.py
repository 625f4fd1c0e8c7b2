"""Records of merges: the merged policies, their weights, and the contents of merge.json. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue

from infra.config import Settings
from infra.store.inputs import format_path, has_run, is_remote
from infra.store.runs import Run, open_run

MERGE: Final = "merge.json"
"""Name of the file in a merged policy's directory that records the merged policies (parents) and their weights."""
STARTS: Final = ("policy/initial", "policy/dpo", "policy/sft", "policy/base")
"""Manifests of the policy from which a run's reinforcement learning starts, latest stage first, because a run may skip
later stages."""

Adapters = Literal["full", "ranks"]


@dataclass(frozen=True, slots=True)
class Parent:
    """One of the policies to merge, with its weight."""

    name: str
    """Name by which the user referred to the policy, such as a path or a run."""
    path: Path
    """Local directory of the model or adapter."""
    weight: float
    start: str = ""
    """Digest of the policy from which its run started, or an empty string if it does not come from a run."""


@dataclass(frozen=True, slots=True)
class MergeWork:
    """Request to write the weighted sum of policies to one directory."""

    parents: tuple[Parent, ...]
    target: Path
    """Empty directory to which the merged policy is written."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the written weights. None keeps the precision of the parents' files."""
    adapters: Adapters = "full"
    """Kind of result: "full" writes a model. "ranks" combines adapters of one base into one adapter of the summed
    ranks."""
    unrelated: bool = False
    """Whether the parents' runs may have started from different policies."""


class MergedParent(Settings):
    """One of the merged policies, as recorded in merge.json."""

    name: str
    weight: float
    digest: str
    """Digest of the policy as runs record it, which covers its files and, for an adapter, also its base."""
    start: str
    """Digest of the policy from which its run started, or an empty string if it does not come from a run."""


class Merge(Settings):
    """Contents of merge.json. The policy is the sum of its parents, each multiplied by its weight."""

    parents: tuple[MergedParent, ...]
    adapters: Adapters
    who: str = ""
    """User who requested the merge, or an empty string if a run did, whose manifest names the user."""
    when: str = ""
    """Time of the merge in UTC, in ISO format."""
    version: str = ""
    """Version of Rheostat that wrote the file."""
    soup: JsonValue = None
    """Preference, mixing weights and statistics if the merge belongs to a soup (averages of policies), else None."""


def start_of(path: Path) -> str:
    """Return the digest of the initial policy of the run that contains a directory, or "" if it is not in a run."""
    place = path if is_remote(path) else path.resolve()
    home = next((parent for parent in place.parents if has_run(parent)), None)
    return "" if home is None else start_of_run(open_run(format_path(home.parent), home.name))


def start_of_run(run: Run) -> str:
    """Return the digest of the policy from which a run's reinforcement learning starts, or "" if none exists yet."""
    start = next((manifest for key in STARTS if (manifest := run.find(key)) is not None), None)
    return "" if start is None else start.bundles["weights"].digest
