"""Configuration of which part of a dataset on the Hugging Face Hub is read. Torch-free."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from rheostat.infra.config import Settings, Since
from rheostat.infra.store.inputs import DataLocation, HubPath

Name = Annotated[str, Field(min_length=1)]


class HubDatasetChoice(Settings):
    """Keys that select the part of a dataset on the Hugging Face Hub, for data paths that may name such a dataset."""

    path: DataLocation
    """File of training data, or the name of a dataset on the Hugging Face Hub."""
    heldout_path: DataLocation | None = None
    """File of evaluation data, or the name of a dataset on the Hugging Face Hub."""
    config: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Configuration (subset) of the dataset on the Hub. Required only if the dataset has several."""
    split: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Split of the dataset on the Hub from which training data is read. Required only if the dataset has several."""
    heldout_split: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Split from which evaluation data is read. It belongs to the dataset in `heldout_path`, or in `path` if
    `heldout_path` is not set."""
    revision: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Branch, tag or commit of the dataset on the Hub in `path`. The default is the main branch. A run records the
    commit and continues to use it."""

    @model_validator(mode="after")
    def _choose_part(self) -> Self:
        """Add configuration, split and revision to the addresses in `path` and `heldout_path`."""
        if (heldout := self.heldout_path) is None and self.heldout_split is not None:
            heldout = self.path
        for key in self._keys_without_dataset(heldout):
            raise ValueError(
                f"{key} is set, but it only has an effect on a dataset on the Hugging Face Hub, and there is none in "
                f"{'heldout_path' if key == 'heldout_split' and self.heldout_path else 'path'}. Remove {key}"
            )
        if self.revision is not None and isinstance(self.path, HubPath):
            written = self.path.address
            if written.revision not in ("", self.revision) and not written.is_pinned:
                raise ValueError(
                    f"revision is {self.revision!r}, but path already contains the revision {written.revision!r} "
                    "after @. Remove one of them"
                )
        part = {"config": self.config, "revision": self.revision}
        own = _is_same_repository(self.path, heldout)
        self.__dict__["path"] = _with_part(self.path, **part, split=self.split)
        if heldout is not None:
            self.__dict__["heldout_path"] = _with_part(
                heldout, config=self.config, revision=self.revision if own else None, split=self.heldout_split
            )
        return self

    def _keys_without_dataset(self, heldout: Path | None) -> Iterator[str]:
        """Yield the keys that are set but have no effect, because the path to which they apply is not a dataset on the
        Hub."""
        if not _is_dataset(self.path):
            yield from (key for key in ("split", "revision") if getattr(self, key) is not None)
        if self.heldout_split is not None and not _is_dataset(heldout):
            yield "heldout_split"
        if self.config is not None and not (_is_dataset(self.path) or _is_dataset(heldout)):
            yield "config"


def _is_dataset(path: Path | None) -> bool:
    """Return whether a path names a whole dataset on the Hub, and not a single file."""
    return isinstance(path, HubPath) and path.address.kind == "dataset" and not path.address.file


def _is_same_repository(path: Path, other: Path | None) -> bool:
    return isinstance(path, HubPath) and isinstance(other, HubPath) and path.address.name == other.address.name


def _with_part(path: Path, *, config: str | None, split: str | None, revision: str | None) -> Path:
    """Return the path with configuration, split and revision added to its address. Parts that the address already has
    are kept."""
    if not isinstance(path, HubPath) or not _is_dataset(path):
        return path
    has = path.address
    address = replace(
        has, config=has.config or config or "", split=has.split or split or "", revision=has.revision or revision or ""
    )
    return path.with_address(address)
