"""Configuration of which part of a dataset on the Hugging Face Hub is read. Torch-free."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from infra.config import Settings, Since
from infra.store.inputs import DataLocation, HubPath

Name = Annotated[str, Field(min_length=1)]


class HubDatasetChoice(Settings):
    """Keys for data files that may be a dataset on the Hugging Face Hub."""

    path: DataLocation
    """File of training data, or a dataset on the Hub."""
    heldout_path: DataLocation | None = None
    """File of evaluation data, or a dataset on the Hub."""
    config: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Configuration (subset) of the dataset on the Hub. Can be unset if the dataset has only one."""
    split: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Split of the dataset on the Hub that is read for training. Can be unset if the dataset has only one."""
    heldout_split: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Split that is read for evaluation, of the dataset in `heldout_path` or else in `path`."""
    revision: Annotated[Name | None, Since("0.2.0", before=None)] = None
    """Branch, tag or commit of the dataset on the Hub in `path`. The default is its main branch. A run records the
    commit and keeps it."""

    @model_validator(mode="after")
    def _choose_part(self) -> Self:
        """Add the keys to the addresses in both paths."""
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
        """Yield the keys that are set although the path to which they apply is no dataset on the Hub."""
        if not _is_dataset(self.path):
            yield from (key for key in ("split", "revision") if getattr(self, key) is not None)
        if self.heldout_split is not None and not _is_dataset(heldout):
            yield "heldout_split"
        if self.config is not None and not (_is_dataset(self.path) or _is_dataset(heldout)):
            yield "config"


def _is_dataset(path: Path | None) -> bool:
    """Return whether a path is a whole dataset on the Hub, not one file of it."""
    return isinstance(path, HubPath) and path.address.kind == "dataset" and not path.address.file


def _is_same_repository(path: Path, other: Path | None) -> bool:
    return isinstance(path, HubPath) and isinstance(other, HubPath) and path.address.name == other.address.name


def _with_part(path: Path, *, config: str | None, split: str | None, revision: str | None) -> Path:
    """Return the path with these parts added to its address, except parts that it already has."""
    if not isinstance(path, HubPath) or not _is_dataset(path):
        return path
    has = path.address
    address = replace(
        has, config=has.config or config or "", split=has.split or split or "", revision=has.revision or revision or ""
    )
    return path.with_address(address)
