"""Cache of preflight results, keyed by a digest of everything on which a result depends.

The cache is `rheostat/checks` in the user's cache directory (`XDG_CACHE_HOME`, else `~/.cache`). Only successful
results are stored. A result that cannot be read is computed again.
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
from pydantic import BaseModel, ValidationError

from rheostat.infra.former_names import HOME
from rheostat.infra.store.inputs import fetch_path, is_on_hub
from rheostat.models.config.checks import CheckResult
from rheostat.models.text.template_files import FOLDER

MAX_RESULTS: Final = 200
"""Maximum number of cached results, of about 1 KB each. The oldest are deleted first."""
LIBRARIES: Final = ("jinja2", "peft", "pydantic", "safetensors", "tokenizers", "torch", "transformers")
"""Libraries whose versions are part of a cached result's key, because the results depend on them."""
WHOLE_BYTES: Final = 2**26
"""Maximum size, in bytes, of a file whose content is hashed into the cache key. Larger files are identified by their
size and modification time."""
HEADER_BYTES: Final = 10**8
"""Maximum size, in bytes, of a safetensors header that is read. The library has the same limit."""


def find_or_compute(directory: Path, key: Callable[[], str], find: Callable[[], CheckResult]) -> CheckResult:
    """Return the cached result of a check, or compute it with `find` and cache it. `key` returns the key of the result.
    If the inputs change during the computation, the key afterwards differs and the result is not cached."""
    before = key()
    with suppress(OSError, ValidationError):
        return CheckResult.model_validate_json((directory / before).read_bytes(), strict=True)
    result = find()
    if key() == before:
        with suppress(OSError):  # a failure to write the cache is harmless
            _store_check(directory, before, result)
    return result


def checks_directory() -> Path | None:
    """Return the directory in which results of preflight checks are cached, or None for a user without a home
    directory."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        home = chosen if chosen.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "rheostat" / "checks"


def build_key(settings: BaseModel, *contents: object) -> str:
    """Return the cache key of a result: a digest of settings, `contents`, files that the settings name, code and
    library versions."""
    files = [(str(path), _digest(path)) for path in sorted(set(_iter_paths(settings)))]
    versions = [sys.version, *(version(library) for library in LIBRARIES)]
    code = [_digest(path) for room in ("models", "infra") for path in sorted((HOME / room).rglob("*.py"))]
    whole = [settings.model_dump_json(), str(Path.cwd()), files, versions, code, [repr(each) for each in contents]]
    return blake3(json.dumps(whole).encode()).hexdigest()


def _store_check(directory: Path, key: str, result: CheckResult) -> None:
    """Write a result to the cache and delete the oldest results so that at most `MAX_RESULTS` remain."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=".", delete=False) as file:
        file.write(result.model_dump_json())
    Path(file.name).replace(directory / key)
    oldest_last = sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in oldest_last[MAX_RESULTS:]:
        path.unlink(missing_ok=True)


def _iter_paths(value: object) -> Iterator[Path]:
    """Yield every file path that occurs in the settings, at any depth of nesting."""
    match value:
        case Path():
            if not is_on_hub(value):  # its address in the settings names the commit
                yield fetch_path(value).absolute()
        case BaseModel():
            for _, part in value:
                yield from _iter_paths(part)
        case Mapping():
            for part in value.values():
                yield from _iter_paths(part)
        case tuple() | list():
            for part in value:
                yield from _iter_paths(part)


def _digest(path: Path) -> str:
    """Return a digest of a file or directory. Of weight files, only headers, sizes and modification times are used."""
    if not path.is_dir():
        return _file_digest(path) if path.exists() else "nothing"
    parts = [(each.name, _file_digest(each)) for each in sorted(path.iterdir()) if each.is_file()]
    parts += [(each.name, _file_digest(each)) for each in sorted((path / FOLDER).glob("*.jinja"))]
    settings = path / "adapter_config.json"
    if settings.is_file() and not (path / "config.json").exists():  # the adapter's base model is in another directory
        parts += [("base", _digest(path / base)) for base in _find_base_model(settings)]
    return blake3(json.dumps(parts).encode()).hexdigest()


def _find_base_model(settings: Path) -> Iterator[str]:
    """Yield the path of an adapter's base model, as stated in its `settings` file, if it is a local directory."""
    with suppress(ValueError, TypeError, KeyError):
        named = json.loads(settings.read_text())["base_model_name_or_path"]
        if isinstance(named, str) and named and (settings.parent / named / "config.json").is_file():
            yield named


def _file_digest(path: Path) -> str:
    """Return a digest of a file's content, or the text of the error if the file cannot be read."""
    try:
        status = path.stat()
        stamp = f"{status.st_size} {status.st_mtime_ns}"
        if path.suffix == ".safetensors":
            with path.open("rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                return f"{blake3(opened.read(min(size, HEADER_BYTES))).hexdigest()} {stamp}"
        return stamp if status.st_size > WHOLE_BYTES else blake3(path.read_bytes()).hexdigest()
    except OSError as error:  # the code that needs the file reports the error in detail
        return str(error)
