"""Run benchmarks on this machine: `python -m bench [--only PART …] [--json FILE]`. Progress is written to stderr.

Each part is a module with a function `measure` that returns tables. No other work should run at the same time.
"""

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bench.tables import Table
from rheostat.infra.errors import BadInput

PARTS = (
    "startup",
    "stages",
    "minute",
    "trl",
    "vision",
    "advantages",
    "shards",
    "wide",
    "controllers",
    "deployments",
    "placement",
    "losses",
    "engine",
    "decoding",
)
ALONE = (
    *("s3", "weights", "moved", "slices", "reality", "curves", "loss_curves", "method_curves", "balanced"),
    *("scale", "staleness", "what_if", "bisect", "vllm", "tools", "agents", "gpu", "updates", "ddpo"),
)
"""Names of benchmarks that take long or need another environment. They run only if `--only` names them."""

QUIET = 0.5
"""Load average of the machine below which it counts as idle. Processes that have just started or ended add a little."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run the benchmarks on this machine.")
    parser.add_argument("--only", choices=(*PARTS, *ALONE), action="append", help="run only this part; can be repeated")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    document: dict[str, object] = {"machine": machine()}
    for name in options.only or PARTS:
        started, load = time.monotonic(), os.getloadavg()[0]
        sys.stderr.write(f"--- {name} (load {load:.1f})\n")
        tables: list[Table] = []
        try:
            for table in importlib.import_module(f"bench.{name}").measure():
                tables.append(table)
                sys.stdout.write(f"\n{table.text()}\n")
                sys.stdout.flush()
        except BadInput as error:
            sys.stderr.write(f"{error}\n")
            return 2
        seconds = time.monotonic() - started
        if load > QUIET:
            sys.stdout.write(
                f"  {name}: the load average was {load:.1f} at the start, so other processes used the cores too\n"
            )
        document[name] = {"seconds": seconds, "load_before": load, "tables": [table.json() for table in tables]}
        sys.stderr.write(f"--- {name}: {seconds:.0f} s\n")
        if options.json is not None:  # after every part, so that an interrupt loses little
            options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return 0


def machine() -> dict[str, object]:
    """Return the number of CPUs, the platform, and the versions of Python and of the main packages."""
    packages = ("torch", "transformers", "deepspeed", "ray", "prefect", "pyarrow", "trl")
    return {
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _find_version(name) for name in packages},
    }


def _find_version(package: str) -> str:
    """Return the installed version of a package, or "none". Most parts do not need all packages."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
