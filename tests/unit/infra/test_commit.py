"""`rheostat --version` names the commit of a checkout, and of a wheel that was built from a checkout."""

import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import rheostat.infra.commit
from rheostat.infra.commit import describe_checkout, find_commit
from tests.support.in_process import run_command
from tests.support.jobs import ROOT
from tests.support.wheels import build_wheel

BUILD_SOURCES = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@pytest.fixture
def checkout(tmp_path):
    """Repository with the files that a wheel of the package infra needs, and one commit."""
    home = tmp_path / "checkout"
    (home / "infra").mkdir(parents=True)
    shutil.copytree(ROOT / "flows/root-package", home / "flows/root-package")
    for name in ("pyproject.toml", "setup.py", "README.md", "infra/__init__.py", "infra/commit.py"):
        shutil.copy(ROOT / name, home / name)
    (home / ".gitignore").write_text("/build/\n")
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=home, check=True)
    return home


def test_a_wheel_names_the_commit_that_it_was_built_from(checkout, tmp_path, monkeypatch):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout[:12]
    with zipfile.ZipFile(build_wheel(checkout, tmp_path)) as archive:
        archive.extract("rheostat/infra/commit.txt", tmp_path)
    monkeypatch.setattr(rheostat.infra.commit, "_WRITTEN", tmp_path / "rheostat/infra/commit.txt")
    assert find_commit() == commit
    assert run_command("--version").output.rstrip().endswith(f"({commit})")


@pytest.mark.thorough
def test_a_wheel_from_a_source_distribution_names_the_commit_of_the_checkout(checkout, tmp_path):
    commit = describe_checkout(checkout)
    subprocess.run([sys.executable, "-c", BUILD_SOURCES, str(tmp_path)], cwd=checkout, check=True, capture_output=True)
    (sources,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        archive.extractall(tmp_path, filter="data")
    with zipfile.ZipFile(build_wheel(tmp_path / sources.name.removesuffix(".tar.gz"), tmp_path)) as archive:
        assert archive.read("rheostat/infra/commit.txt").decode().strip() == commit


def test_a_checkout_names_its_commit_and_whether_files_differ_from_it(checkout, tmp_path):
    commit = describe_checkout(checkout)
    (checkout / "README.md").write_text("other")
    assert len(commit) == 12 and describe_checkout(checkout) == f"{commit}-dirty"
    assert describe_checkout(tmp_path) == "", "no checkout"
