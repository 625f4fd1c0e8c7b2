"""Build hook of hatchling: wheels and source distributions carry the commit that they were built from."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CommitHook(BuildHookInterface[Any]):
    """Adds infra/commit.txt to what is built, except to editable installations, which ask git."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the commit into the build."""
        root = Path(self.root)
        if version == "editable" or not (
            commit := runpy.run_path(str(root / "infra/commit.py"))["describe_checkout"](root)
        ):
            return
        written = root / "build" / "commit.txt"
        written.parent.mkdir(exist_ok=True)
        written.write_text(f"{commit}\n")
        build_data["force_include"][str(written)] = "infra/commit.txt"
