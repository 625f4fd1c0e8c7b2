"""Python environments for engines and other packages that cannot be installed in the same environment as Rheostat. This
module finds an environment and its versions."""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

from blake3 import blake3
from pydantic import ValidationError

from rheostat.infra.config import Settings
from rheostat.infra.environments.gpus import Platform, check_driver, platform_here
from rheostat.infra.errors import BadInput

STAMP: Final = "rheostat.json"
"""Name of the stamp file, which `install` writes into each environment to record its content. A stamp without versions
marks an environment whose installation did not finish."""
IMPORT_SECONDS: Final = 300.0
"""Maximum time in seconds for the import of an engine. An import usually takes 5 to 15 s, but much longer if its files
are not in the disk cache."""

IMPORT: Final = """
import importlib, json, platform, sys
modules = {name: importlib.import_module(name) for name in sys.argv[1:]}
versions = {name: module.__version__ for name, module in modules.items() if hasattr(module, "__version__")}
torch = sys.modules.get("torch")
told = "cuda" if torch is not None and torch.version.cuda else "cpu"
print(json.dumps({"platform": told, "versions": versions | {"python": platform.python_version()}}))
"""

PREPARE_VERIFIERS: Final = """
import asyncio, os, sys
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes import SubprocessConfig, provision_runtime
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
async def prepare():
    async with provision_runtime(SubprocessConfig()) as runtime:
        await runtime.prepare_uv_script(CHAT_PROGRAM_SOURCE)
asyncio.run(prepare())
"""
"""Code that installs the program of the harnesses `null` and `bash`, so that episodes find its packages."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Description of an inference engine or other package that is installed in a separate Python environment: the
    modules that it needs, and the files that pin its packages."""

    version: str
    modules: tuple[str, ...]
    """Modules that must be importable: the engine first, then the libraries that affect results, and the server."""
    pins: Path = Path(__file__).parent
    """Folder with the files `<engine>-<platform>.txt`, which pin the version of every package."""
    pythons: Mapping[Platform, tuple[str, ...]] = field(default_factory=dict)
    """Versions of Python for which all pinned packages have wheels and fit together. A platform that is not listed has
    no restriction."""
    platforms: tuple[Platform, ...] = ("cpu", "cuda")
    """Platforms for which builds exist. If there is none for CUDA, the build for CPUs is used on all machines."""
    python_key: str = "engine.python"
    """Configuration key of the Python executable, for messages."""
    alternative: str = ", or engine.base_urls to running servers"
    """Alternative to setting `python_key`, for messages."""
    preparation: str = ""
    """Python code that runs in the environment at the end of its installation. Empty if there is none."""


DISTRIBUTIONS: Final[Mapping[str, Distribution]] = {
    "vllm": Distribution(
        version="0.32.0",
        modules=("vllm", "torch", "transformers", "vllm.entrypoints.openai.api_server"),
        pythons={"cuda": ("3.11", "3.12")},
    ),
    "verifiers": Distribution(
        version="0.4.0",
        modules=("verifiers", "verifiers.v1"),
        platforms=("cpu",),
        python_key="python of kind 'verifiers'",
        alternative="",
        preparation=PREPARE_VERIFIERS,
    ),
    "lm_eval": Distribution(
        version="0.4.13",  # rheostat_lm_eval.py uses functions that lm-eval does not document
        modules=("lm_eval", "lm_eval.models.openai_completions", "transformers"),
        platforms=("cpu",),
        python_key="python of kind 'lm_eval'",
        alternative="",
    ),
    "inspect": Distribution(
        version="0.3.285",  # rheostat_inspect.py uses private functions of Inspect to load tasks
        modules=("inspect_ai", "openai"),
        platforms=("cpu",),
        python_key="python of kind 'inspect'",
        alternative="",
    ),
}


class Environment(Settings):
    """Python environment from which an engine can be imported."""

    engine: str
    """Name of the engine."""
    python: Path
    """Path of the environment's Python executable, as it is written in the setting `engine.python`."""
    platform: Platform
    """Platform for which the engine was built."""
    versions: dict[str, str]
    """Versions of the engine, of the libraries that affect its results, and of Python."""

    def text(self) -> str:
        """Return a description of the environment in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{versions}, for {self.platform}, at {self.python}"


class Stamp(Settings):
    """Content of the stamp file in an environment: a digest of the pinned package versions, and the result of the
    installation."""

    pins: str
    """BLAKE3 digest of the file that lists all packages with their versions."""
    made: Environment | None = None
    """Finished environment, or None while the installation is not complete."""


def find_distribution(engine: str) -> Distribution:
    """Return the description of an engine."""
    return DISTRIBUTIONS[engine]


def pins_path(engine: str, platform: Platform) -> Path:
    """Return the path of the file that pins the version of every package in an engine's environment."""
    return DISTRIBUTIONS[engine].pins / f"{engine}-{platform}.txt"


def supported_pythons(engine: str, platform: Platform) -> tuple[str, ...]:
    """Return the versions of Python that an engine's pinned packages support, or an empty tuple if there is no
    restriction."""
    return DISTRIBUTIONS[engine].pythons.get(platform, ())


def pins_digest(engine: str, platform: Platform) -> str:
    """Return the BLAKE3 digest of the file that pins the version of every package in an engine's environment."""
    return blake3(pins_path(engine, platform).read_bytes()).hexdigest()


def default_platform(engine: str) -> Platform:
    """Return the platform for which an engine is installed on this machine: the platform of the machine, if the engine
    has a build for it."""
    return "cpu" if DISTRIBUTIONS[engine].platforms == ("cpu",) else platform_here()


def default_directory(engine: str, platform: Platform) -> Path:
    """Return the default directory of an engine's environment. Its parent folder can be set with the environment
    variable RHEOSTAT_ENGINES."""
    chosen = os.environ.get("RHEOSTAT_ENGINES")
    home = Path(chosen).absolute() if chosen else Path.home() / ".cache" / "rheostat" / "engines"
    return home / f"{engine}-{DISTRIBUTIONS[engine].version}-{platform}"


def python_in(directory: Path) -> Path:
    """Return the path of the Python executable of an environment."""
    return directory / "bin" / "python"


def read_stamp(directory: Path) -> Stamp | None:
    """Return the content of the stamp file in an environment, or None if `install` did not create the environment. If
    the file cannot be read, return a stamp that marks the environment as incomplete."""
    try:
        return Stamp.model_validate_json((directory / STAMP).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError:  # incomplete, or written by another version: the environment is created again
        return Stamp(pins="")


def complete(directory: Path, engine: str, *, platform: Platform) -> Environment | None:
    """Return the environment of an engine in a directory if its installation is complete and up to date. Return None if
    the installation is incomplete, has other package versions, or has no Python executable."""
    stamp = read_stamp(directory)
    if stamp is None or stamp.made is None or stamp.pins != pins_digest(engine, platform):
        return None
    python = python_in(directory)
    return stamp.made.model_copy(update={"python": python}) if _is_executable(python) else None


def find_python(engine: str, given: Path | None) -> Path:
    """Return `given` if it is not None, otherwise the Python executable of the environment that `install` created for
    the engine. Raises BadInput if neither exists."""
    return _check_python(engine, given) if given is not None else _find_installed(engine).python


def find_environment(engine: str, given: Path | None) -> Environment:
    """Return the environment in which an engine would run. This is the environment of the Python executable `given`, or
    the installed environment if `given` is None.

    The versions are read from the stamp if `install` created the environment. Otherwise the engine is imported. Raises
    BadInput if there is no such environment.
    """
    if given is None:
        return _find_installed(engine)
    python = _check_python(engine, given)
    stamp = read_stamp(python.parent.parent)
    if stamp is not None and stamp.made is not None:
        return stamp.made.model_copy(update={"python": python})
    return check_environment(engine, python)


def installed_versions(engine: str, given: Path | None) -> dict[str, str]:
    """Return the versions of an engine and of the libraries that affect its results, without importing anything. Return
    an empty dict if the engine is not installed on this machine. `given` is a Python executable, or None for the
    installed environment."""
    try:
        home = find_python(engine, given).parent.parent
    except BadInput:
        return {}
    names = {module.partition(".")[0] for module in DISTRIBUTIONS[engine].modules}
    folders = [str(path) for path in home.glob("lib/python*/site-packages")]
    found = metadata.distributions(path=folders)
    distributions = (each for each in found if each.name.removesuffix("-cpu").replace("-", "_") in names)
    return {
        each.name if each.name.startswith(engine) else f"{each.name} of {engine}": each.version
        for each in distributions
    }


def check_environment(engine: str, python: Path) -> Environment:
    """Import an engine with this Python executable, and return a description of the environment with its versions.
    Raises BadInput with the last line of the error if the import fails."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    refusal = f"{python} cannot import {engine}"
    try:
        done = subprocess.run(
            [python, "-c", IMPORT, *DISTRIBUTIONS[engine].modules],
            env=variables | {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_SECONDS,
        )
    except OSError as error:
        raise BadInput(
            f"{refusal}: {error.strerror}. Set {DISTRIBUTIONS[engine].python_key} to an executable Python interpreter."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BadInput(f"{refusal} within {IMPORT_SECONDS:g} s. Check that the machine is not overloaded.") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise BadInput(
            f"{refusal}: {lines[-1] if lines else f'exit code {done.returncode}'}. Install it in the environment of "
            f"this Python, or create an environment with `rheostat engine install {engine}`."
        )
    answer = json.loads(done.stdout.splitlines()[-1])  # libraries may print lines before
    return Environment(engine=engine, python=python, **answer)


def check_environment_driver(environment: Environment) -> None:
    """Raise BadInput if the NVIDIA driver of this machine is too old for the torch of an engine's environment."""
    tag = re.search(r"\+cu(\d+)(\d)$", environment.versions.get("torch", ""))  # 2.13.0+cu130 is for CUDA 13.0
    if tag is not None:
        check_driver(f"{tag[1]}.{tag[2]}")


def _check_python(engine: str, python: Path) -> Path:
    if not _is_executable(python):
        raise BadInput(
            f"{DISTRIBUTIONS[engine].python_key} is {str(python)!r}, which is not an executable file. Set it to the "
            f"Python interpreter of an environment with {engine}."
        )
    return python.absolute()


def _find_installed(engine: str) -> Environment:
    """Return the engine's environment that `install` created on this machine. If a machine with GPUs has no CUDA
    environment, return the CPU environment. Raises BadInput if no environment is installed."""
    platforms: list[Platform] = ["cuda", "cpu"] if default_platform(engine) == "cuda" else ["cpu"]
    for platform in platforms:
        environment = complete(default_directory(engine, platform), engine, platform=platform)
        if environment is not None:
            return environment
    directory, distribution = default_directory(engine, platforms[0]), DISTRIBUTIONS[engine]
    raise BadInput(
        f"{engine} is not ready to use: {directory} has {_describe_fault(read_stamp(directory))}. Run `rheostat engine "
        f"install {engine}`, or set {distribution.python_key} to the Python of another environment"
        f"{distribution.alternative}."
    )


def _describe_fault(stamp: Stamp | None) -> str:
    if stamp is None:
        return "no installation"
    if stamp.made is None:
        return "an incomplete installation"
    return "an installation with other package versions or without its Python"


def _is_executable(python: Path) -> bool:
    return python.is_file() and os.access(python, os.X_OK)
