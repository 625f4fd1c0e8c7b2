"""`rheostat --version` names the commit of a checkout, and of a wheel that was built from a checkout."""

import shutil
import subprocess
import sys
import zipfile

import pytest

import rheostat.infra.commit
from rheostat.infra.commit import describe_checkout, find_commit
from tests.support.in_process import run_command
from tests.support.jobs import ROOT


@pytest.fixture
def checkout(tmp_path):
    """Repository with the files that a wheel of the package infra needs, and one commit."""
    home = tmp_path / "checkout"
    (home / "infra").mkdir(parents=True)
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "infra/__init__.py", "infra/commit.py"):
        shutil.copy(ROOT / name, home / name)
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=home, check=True)
    return home


def test_a_wheel_names_the_commit_that_it_was_built_from(checkout, tmp_path, monkeypatch):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout[:12]
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(built, cwd=checkout, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract("infra/commit.txt", tmp_path)
    monkeypatch.setattr(rheostat.infra.commit, "_WRITTEN", tmp_path / "infra/commit.txt")
    assert find_commit() == commit
    assert run_command("--version").output.rstrip().endswith(f"({commit})")


def test_a_checkout_names_its_commit_and_whether_files_differ_from_it(checkout, tmp_path):
    commit = describe_checkout(checkout)
    (checkout / "README.md").write_text("other")
    assert len(commit) == 12 and describe_checkout(checkout) == f"{commit}-dirty"
    assert describe_checkout(tmp_path) == "", "no checkout"
