"""Small runs that past versions of Rheostat trained, stored in tests/runs/past, one archive for each commit.

`python -m tests.support.past_runs COMMIT` adds the run of a commit to the corpus. The job must be one that the code of
that commit accepts. A change of a stored format needs such a run of the commit before the change.
"""

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from rheostat.infra.plugins import TARGETS
from tests.support.jobs import ROOT, SCRATCH, UPDATE

NAME = "past"
"""Name of every stored run."""
JOB = f"""
name = "past"
iterations = 1
{SCRATCH}
vocab_size = 300
hidden_size = 8
intermediate_size = 8
layers = 1
heads = 1
kv_heads = 1
[warmup]
steps = 1
[rollout]
prompts = 2
group_size = 4
shard_prompts = 1
[rollout.sampling]
max_new_tokens = 6
[scoring]
rewards = [{{kind = "regex", pattern = "[a-z]"}}]
{UPDATE}
[evaluation]
problems = 1
[controllers]
count = 1
[pools]
cluster = "threads"
"""
"""Job that all stored runs trained: one iteration, whose groups have unequal rewards."""
ARCHIVES = ROOT / "tests/runs/past"


def past_versions() -> list[str]:
    """Return the version and commit of each stored run."""
    return sorted(path.name.removesuffix(".tar.xz") for path in ARCHIVES.glob("*.tar.xz"))


def unpack_run(past_version: str, home: Path) -> Path:
    """Unpack a stored run; return the store that holds it."""
    with tarfile.open(ARCHIVES / f"{past_version}.tar.xz") as archive:
        archive.extractall(home, filter="data")
    return home


def train_at(commit: str) -> Path:
    """Train the job with the code of a commit and the libraries of today; return the archive of the run."""
    short = _git("rev-parse", "--short=7", commit).decode().strip()
    version = tomllib.loads(_git("show", f"{commit}:pyproject.toml").decode())["project"]["version"]
    path = ARCHIVES / f"{version}-{short}.tar.xz"
    with TemporaryDirectory() as folder:
        home, code = Path(folder), Path(folder, "code")
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
            archive.extractall(code, filter="data")
        (home / "job.toml").write_text(JOB)
        own = ("PREFECT_", TARGETS)  # folders of this checkout contain other code of the same names
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        program, folders = "flows.cli.app", [code]
        if (links := code / ".ci/package.sh").exists():  # since the package rheostat contains all modules
            subprocess.run([links, "links", home / "view"], check=True)
            program, folders = "rheostat", [home / "view", code]
        environment = kept | {
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "PREFECT_HOME": str(home / "prefect"),
            "DO_NOT_TRACK": "1",
        }
        command = [
            sys.executable,
            "-m",
            program,
            "train",
            str(home / "job.toml"),
            "--store",
            str(home / "store"),
        ]
        subprocess.run(command, cwd=code, env=environment, check=True)
        ARCHIVES.mkdir(exist_ok=True)
        with tarfile.open(path, "w:xz", preset=9) as archive:
            archive.add(home / "store", arcname=".", filter=_without_host)
    return path


def _without_host(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Remove reports, which are large and written again, and the name of the host that trained the run."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return None if f"/{NAME}/report" in entry.name else entry


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout


if __name__ == "__main__":
    for commit in sys.argv[1:]:
        print(train_at(commit))  # noqa: T201 -- a command
