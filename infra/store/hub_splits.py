"""Splits of datasets on the Hugging Face Hub: which files of the repository contain them.

The library `datasets` finds the files from the metadata of the repository or from the names of its files. It only gets
the README and empty files with the same names, so it reads no data and accesses no network.
"""

import json
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final

from rheostat.infra.errors import BadInput
from rheostat.infra.store.hub_files import NOTES
from rheostat.infra.store.hub_names import HubAddress
from rheostat.infra.user_files import DATA_SUFFIXES, PACKED_SUFFIXES
from rheostat.infra.validation_errors import nearest

METADATA: Final = "metadata"
"""Name, without its suffix, of the file with the rows of a dataset that consists of images (`imagefolder`)."""


def choose_files(address: HubAddress, folder: Path, files: tuple[str, ...]) -> list[str]:
    """Return the paths of the files that contain the configuration and split of a dataset that the address names, in
    order. `folder` contains the README, and `files` are all paths in the repository.

    Raises BadInput, with the possible values, if the configuration or split does not exist or must be chosen.
    """
    splits = _files_by_split(address, folder, files)
    if address.split not in splits and (address.split or len(splits) > 1):
        problem = f"has no split {address.split!r}" if address.split else f"has {len(splits)} splits"
        raise BadInput(
            f"dataset {address.name}{_of_config(address)} {problem}. Set split to one of: {', '.join(splits)}"
            f"{nearest(address.split, [*splits])}"
        )
    chosen = splits[address.split or next(iter(splits))]
    chosen = [name for name in chosen if PurePosixPath(name).stem == METADATA] or chosen  # a folder of images
    for name in chosen:
        suffixes = [suffix for suffix in PurePosixPath(name).suffixes if suffix not in PACKED_SUFFIXES]
        if not suffixes or suffixes[-1] not in DATA_SUFFIXES:
            raise BadInput(
                f"dataset {address.name}: the file {name} has a format that cannot be read. Files must have one of "
                f"the suffixes {', '.join(DATA_SUFFIXES)}. Convert it with "
                "datasets.load_dataset(…).to_parquet('train.parquet'), and set the path of this file"
            )
    return chosen


def _of_config(address: HubAddress) -> str:
    return f" (config {address.config!r})" if address.config else ""


@cache
def _files_by_split(address: HubAddress, folder: Path, files: tuple[str, ...]) -> dict[str, list[str]]:
    """Return the paths of the files of each split of a dataset, for the configuration that the address names.

    The result is stored next to the cached snapshot, because importing `datasets` takes seconds.
    """
    stored = folder.parent.parent / NOTES / f"{address.revision}.{address.config}.json"
    with suppress(OSError, ValueError):
        return {name: [*paths] for name, paths in json.loads(stored.read_text()).items()}
    splits = _find_splits(address, folder, files)
    with suppress(OSError):
        stored.parent.mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(splits))
    return splits


def _find_splits(address: HubAddress, folder: Path, files: tuple[str, ...]) -> dict[str, list[str]]:
    import datasets

    with TemporaryDirectory(prefix="rheostat-hub-") as scratch:
        outline, caches = Path(scratch, "repository").resolve(), Path(scratch, "cache")
        for name in files:
            if not name.endswith(".py") and name != "README.md":
                (outline / name).parent.mkdir(parents=True, exist_ok=True)
                (outline / name).touch()
        with suppress(FileNotFoundError):
            readme = (folder / "README.md").read_bytes()
            if readme.lstrip().startswith(b"---"):  # without metadata, the library would print a warning
                (outline / "README.md").write_bytes(readme)
        try:
            configs = datasets.get_dataset_config_names(str(outline))
            if address.config not in configs and (address.config or len(configs) > 1):
                problem = f"has no config {address.config!r}" if address.config else f"has {len(configs)} configs"
                raise BadInput(
                    f"dataset {address.name} {problem}. Set config to one of: {', '.join(configs)}"
                    f"{nearest(address.config, configs)}"
                )
            name = address.config or configs[0]
            data_files = datasets.load_dataset_builder(str(outline), name, cache_dir=str(caches)).config.data_files
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            if isinstance(error, BadInput):
                raise
            reason = " ".join(str(error).replace(str(outline), address.name).split())[:200]
            raise BadInput(
                f"dataset {address.name}: its data files were not found: {reason}. Set the address of a file: "
                f"hf://datasets/{address.name}/FILE"
            ) from error
        return {
            str(split): [Path(path).relative_to(outline).as_posix() for path in paths]
            for split, paths in (data_files or {}).items()
        }
