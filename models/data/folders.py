"""Folders that contain the files of one data set: shards of one format, or a folder that `datasets` saved."""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

from rheostat.infra.errors import BadInput

SPLITS_FILE: Final = "dataset_dict.json"
"""File in which `DatasetDict.save_to_disk` lists the splits. Each split is a folder."""
STATE_FILE: Final = "state.json"
"""File in which `Dataset.save_to_disk` lists the data files in the order of the rows."""
OTHER_FILES: Final = (SPLITS_FILE, STATE_FILE, "dataset_info.json", "dataset_infos.json")
"""Files that `datasets` writes next to the data files. They describe the data and contain no rows."""


def list_data_files(folder: Path, name: str, *, formats: Collection[str], packed: Collection[str]) -> list[Path]:
    """Return the data files of a folder in the order of the rows: as `datasets` saved them, or else sorted by name.

    `formats` are the suffixes of data files, and `packed` the suffixes that may follow for compressed files. Hidden
    files, and files whose names begin with `_`, are ignored. Raises BadInput, which names the folder by `name`, if the
    folder contains several splits, no data files, or data files of several formats.
    """
    if (folder / SPLITS_FILE).is_file():
        splits = _read_json(folder / SPLITS_FILE, name).get("splits")
        listed = ", ".join(map(str, splits)) if isinstance(splits, list) else "unknown"
        raise BadInput(
            f"{name}: the folder contains several splits: {listed}. Set the path to the folder of one split, such as "
            f"{name}/{splits[0] if isinstance(splits, list) and splits else 'train'}."
        )
    if (folder / STATE_FILE).is_file():
        return _list_saved_files(folder, name)
    entries = sorted(each for each in folder.iterdir() if not each.name.startswith((".", "_")))
    suffixes = {each: _find_suffix(each, packed) for each in entries if each.is_file() and each.name not in OTHER_FILES}
    files = [each for each in entries if suffixes.get(each) in formats]
    kinds = Counter(suffixes[each] for each in files)
    if len(kinds) == 1:
        return files
    if kinds:
        counts = ", ".join(f"{number} {suffix}" for suffix, number in sorted(kinds.items()))
        raise BadInput(
            f"{name}: the folder contains data files of several formats: {counts}. All files of a folder must have the "
            "same format. Set the path to one file, or move the others to another folder."
        )
    shown = [f"{each.name}/" if each.is_dir() else each.name for each in entries[:4]]
    listed = (
        f"It contains {', '.join(shown)}{', …' if len(entries) > len(shown) else ''}. " if shown else "It is empty. "
    )
    raise BadInput(
        f"{name}: the folder contains no data files. {listed}Data files have one of the suffixes {', '.join(formats)}. "
        "Set the path to a folder that contains such files, or to one file."
    )


def _list_saved_files(folder: Path, name: str) -> list[Path]:
    """Return the data files of a folder that `Dataset.save_to_disk` wrote, in the order of the rows. `name` names the
    folder in messages."""
    listed = _read_json(folder / STATE_FILE, name).get("_data_files")
    names = [each.get("filename") for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    files = [folder / each for each in names if isinstance(each, str) and each == Path(each).name]
    missing = [each.name for each in files if not each.is_file()]
    if not files or missing or len(files) < len(names):
        raise BadInput(
            f"{name}: {STATE_FILE} must list the data files of the folder, but "
            f"{f'{missing[0]} does not exist' if missing else 'it lists none'}. Save the data set again with "
            "save_to_disk."
        )
    return files


def _read_json(path: Path, name: str) -> dict[str, object]:
    """Return the object in a JSON file. Raises BadInput, which names the file by `name`, if the file contains no JSON
    object."""
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadInput(
            f"{name}/{path.name}: the file is not valid JSON ({error}). Save the data set again with save_to_disk, or "
            "set the path to its data files"
        ) from error
    if not isinstance(document, dict):
        raise BadInput(
            f"{name}/{path.name}: the file must contain a JSON object, but it contains a {type(document).__name__}. "
            "Save the data set again with save_to_disk, or set the path to its data files"
        )
    return document


def _find_suffix(path: Path, packed: Collection[str]) -> str:
    """Return the suffix that names the format of a file, such as `.csv`, without a suffix in `packed` for its
    compression."""
    return Path(path.stem).suffix if path.suffix in packed else path.suffix
