"""Build of wheels and source distributions: the packages inside `rheostat`, and the commit that they were built from.

pyproject.toml maps the folders of this repository to packages. The list of packages can only be computed here.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
FOLDERS = ("flows", "tasks", "models", "placement", "infra")


def write_commit(folder: Path) -> None:
    """Write the commit of this checkout to the file commit.txt in `folder`. Write nothing outside a checkout."""
    if commit := runpy.run_path(str(ROOT / "infra/commit.py"))["describe_checkout"](ROOT):
        folder.joinpath("commit.txt").write_text(f"{commit}\n")


class BuildWithCommit(build_py):
    """Adds rheostat/infra/commit.txt to a wheel. Editable installations read the commit with git instead."""

    def run(self) -> None:
        """Build the modules and data files, without what an earlier build has left."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib, "rheostat/infra"))


class SourcesWithCommit(sdist):
    """Adds infra/commit.txt to a source distribution."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files of the distribution."""
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir, "infra"))


names = find_packages(str(ROOT), include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
ROOT.joinpath("build").mkdir(exist_ok=True)
setup(
    packages=["rheostat", *(f"rheostat.{name}" for name in names)],
    options={"egg_info": {"egg_base": "build"}},  # metadata at the root would be found in place of the installed ones
    cmdclass={"build_py": BuildWithCommit, "sdist": SourcesWithCommit},
)
