"""Records of merges: which policies are added up, with which weights, and what of them the result says. Torch-free."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import JsonValue

from infra.config import Settings
from infra.store.inputs import has_run, is_remote, written
from infra.store.runs import Run, open_run

MERGE: Final = "merge.json"
"""What a merged directory says of its parents."""
STARTS: Final = ("policy/initial", "policy/dpo", "policy/sft", "policy/base")
"""Manifests of the policy that a run's reinforcement starts from, the furthest first: it may have ended before."""

Adapters = Literal["full", "ranks"]


@dataclass(frozen=True, slots=True)
class Parent:
    """A policy that is merged."""

    name: str
    """As whoever asks calls it."""
    path: Path
    """Its directory on this machine, of a model or of an adapter."""
    weight: float
    start: str = ""
    """Digest of the policy from which its run started; empty where it is from elsewhere."""


@dataclass(frozen=True, slots=True)
class MergeWork:
    """Write the weighted sum of policies as one directory."""

    parents: tuple[Parent, ...]
    target: Path
    """An empty directory."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the written weights; none is that of the parents' files."""
    adapters: Adapters = "full"
    """Whether a model is written, or of adapters over one base another adapter, of their ranks together."""
    unrelated: bool = False
    """Whether the parents' runs may have started from different policies."""


class MergedParent(Settings):
    """A parent as merge.json names it."""

    name: str
    weight: float
    digest: str
    """Of the policy as a run names it: of its files, and of its base where it is an adapter."""
    start: str
    """Digest of the policy from which its run started; empty where it is from elsewhere."""


class Merge(Settings):
    """merge.json: the policy is the sum of its parents, each times its weight."""

    parents: tuple[MergedParent, ...]
    adapters: Adapters
    who: str = ""
    """Who asked for it; empty where a run made it, whose manifest says so."""
    when: str = ""
    """UTC time in ISO format."""
    version: str = ""
    """Of the code that wrote it."""
    soup: JsonValue = None
    """Preference, mixing and statistics, where it is a soup's."""


def start_of(path: Path) -> str:
    """Digest of the policy from which the run started in which a policy's directory lies; empty for one in no run."""
    place = path if is_remote(path) else path.resolve()
    home = next((parent for parent in place.parents if has_run(parent)), None)
    return "" if home is None else start_of_run(open_run(written(home.parent), home.name))


def start_of_run(run: Run) -> str:
    """Digest of the policy from which a run's reinforcement started."""
    found = next((manifest for key in STARTS if (manifest := run.find(key)) is not None), None)
    return "" if found is None else found.bundles["weights"].digest
