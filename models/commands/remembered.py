"""Answers of the input check that are known already, kept by a digest of all that they follow from.

They lie in `rheostat/checks` of the user's cache (`XDG_CACHE_HOME`, else `~/.cache`). Only what was found right is
kept; an answer that cannot be read is found again.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Final

from blake3 import blake3
from pydantic import BaseModel, TypeAdapter, ValidationError

from infra.store.inputs import fetched

KEPT: Final = 200
"""Answers, the newest ones; each has about a kilobyte."""
LIBRARIES: Final = ("jinja2", "peft", "pydantic", "safetensors", "tokenizers", "torch", "transformers")
"""What an answer depends on beside our own code."""
WHOLE_BYTES: Final = 2**26
"""Larger files are known by size and time alone."""
HEADER_BYTES: Final = 10**8
"""The longest header that safetensors reads, whatever a file says of itself."""
HOUSE: Final = Path(__file__).parents[2]

_FACTS: Final = TypeAdapter(dict[str, float])


def remembered(directory: Path, key: Callable[[], str], find: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the answer that is kept under the key, else find it and keep it.

    What changes while it is looked at has another key afterwards, and is not kept.
    """
    before = key()
    with suppress(OSError, ValidationError):
        return _FACTS.validate_json((directory / before).read_bytes(), strict=True)
    facts = find()
    if key() == before:
        with suppress(OSError):  # no cache, no harm
            _keep(directory, before, facts)
    return facts


def checks_directory() -> Path | None:
    """Return where answers are kept; nowhere for a user without a home."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        home = chosen if chosen.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "rheostat" / "checks"


def key_of(settings: BaseModel, *contents: object) -> str:
    """Name what an answer follows from: settings, contents, every file that the settings name, code and libraries."""
    files = [(str(path), _digest(path)) for path in sorted(set(_paths(settings)))]
    versions = [sys.version, *(version(library) for library in LIBRARIES)]
    code = [_digest(path) for room in ("models", "infra") for path in sorted((HOUSE / room).rglob("*.py"))]
    whole = [settings.model_dump_json(), str(Path.cwd()), files, versions, code, [repr(each) for each in contents]]
    return blake3(json.dumps(whole).encode()).hexdigest()


def _keep(directory: Path, key: str, facts: Mapping[str, float]) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", delete=False) as written:
        json.dump(facts, written)
    Path(written.name).replace(directory / key)
    oldest_last = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in oldest_last[KEPT:]:
        path.unlink(missing_ok=True)


def _paths(value: object) -> Iterator[Path]:
    """Find every path that settings name."""
    match value:
        case Path():
            yield fetched(value).absolute()
        case BaseModel():
            for _, part in value:
                yield from _paths(part)
        case Mapping():
            for part in value.values():
                yield from _paths(part)
        case tuple() | list():
            for part in value:
                yield from _paths(part)


def _digest(path: Path) -> str:
    """Name what lies there; of weights only their header is read."""
    if not path.is_dir():
        return _file_digest(path) if path.exists() else "nothing"
    parts = [(each.name, _file_digest(each)) for each in sorted(path.iterdir()) if each.is_file()]
    settings = path / "adapter_config.json"
    if settings.is_file() and not (path / "config.json").exists():  # its base lies elsewhere
        parts += [("base", _digest(path / base)) for base in _base(settings)]
    return blake3(json.dumps(parts).encode()).hexdigest()


def _base(settings: Path) -> Iterator[str]:
    with suppress(ValueError, TypeError, KeyError):
        named = json.loads(settings.read_text())["base_model_name_or_path"]
        if isinstance(named, str) and named and (settings.parent / named / "config.json").is_file():
            yield named


def _file_digest(path: Path) -> str:
    try:
        found = path.stat()
        stamp = f"{found.st_size} {found.st_mtime_ns}"
        if path.suffix == ".safetensors":
            with path.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                return f"{blake3(opened.read(min(size, HEADER_BYTES))).hexdigest()} {stamp}"
        return stamp if found.st_size > WHOLE_BYTES else blake3(path.read_bytes()).hexdigest()
    except OSError as error:  # whoever needs the file says best what is wrong with it
        return str(error)
