"""`rheostat verify` finds every changed, cut or missing file of a run, and names it."""

import shutil

import pytest

from rheostat.infra.errors import RheostatError
from rheostat.infra.store.manifests import decode_manifest
from rheostat.tasks.verification.invariants import missing_states, verify_run
from tests.support.in_process import copy_job

pytestmark = pytest.mark.timeout(1000)  # the fixture is a whole job


@pytest.fixture(scope="module")
def copy(reference, tmp_path_factory):
    """Copy of the undisturbed run, which each test damages and repairs."""
    return copy_job(reference, tmp_path_factory.mktemp("copy") / "job")


def checked_files(job):
    """Return all files that a digest or a seal protects: all except the lock, plots, and files derived from seals."""
    paths = (path for path in sorted(job.run.rglob("*")) if path.is_file())
    files = [path for path in paths if path.name not in ("lock", "metrics.jsonl") and "report" not in path.parts]
    assert len(files) > 60
    return files


def problems_of(job):
    """Return the problems of the run. A run whose record cannot be read has a single problem."""
    try:
        return "\n".join(verify_run(str(job.store), "tiny"))
    except RheostatError as error:
        return str(error)


def names(problems, path, job):
    """Return whether the problems name the file, its manifest key or its bundle."""
    key = path.relative_to(job.run).as_posix()
    known = {key, key.removeprefix("manifests/").removesuffix(".json"), path.parent.relative_to(job.run).as_posix()}
    return any(f"'{name}'" in problems for name in known) or (key == "run.json" and "'tiny'" in problems)


def test_verify_accepts_an_undamaged_run(copy):
    assert problems_of(copy) == ""


def test_one_flipped_bit_in_any_file_is_found_and_the_file_is_named(copy):
    for index, path in enumerate(checked_files(copy)):
        whole = path.read_bytes()
        at = (index * 7919) % len(whole)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << index % 8]) + whole[at + 1 :])
        assert names(problems_of(copy), path, copy), (path, at)
        path.write_bytes(whole)
    assert problems_of(copy) == ""


@pytest.mark.system
def test_any_file_cut_in_half_is_found_and_named(copy):
    for path in checked_files(copy):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        assert names(problems_of(copy), path, copy), path
        path.write_bytes(whole)


@pytest.mark.system
def test_any_lost_file_is_found_and_named(copy):
    """Skip the last chain record, which has no successor, and what only the absence of a retired bundle reveals.

    The newest version's optimizer state is not damage, because the run recomputes it, but verify names it.
    """
    last = max(copy.run.glob("chain/*"))
    for path in checked_files(copy):
        aside = path.rename(path.with_name("aside"))
        shutil.move(aside, copy.home / "aside")
        problems = problems_of(copy)
        found = names(problems, path, copy) or names(str(missing_states(str(copy.store), "tiny")), path, copy)
        assert found or path == last or ("retention" in path.parts and problems), path
        shutil.move(copy.home / "aside", path)
    assert problems_of(copy) == ""


def test_edited_metrics_with_a_recomputed_digest_are_found(copy):
    """Edit the metrics as somebody would who wants another result and knows the format."""
    for key in ("eval-0000/summary", "eval-0003/summary", "it-0003/seal", "it-0003/credit"):
        path = copy.run / f"manifests/{key}.json"
        whole = path.read_bytes()
        manifest = decode_manifest(whole, key=key)
        path.write_bytes(manifest.model_copy(update={"metrics": {**manifest.metrics, "accuracy": 2.0}}).encode())
        assert names(problems_of(copy), path, copy), path
        path.write_bytes(whole)


@pytest.mark.parametrize("files", ["shards/*/*", "manifests/it-*/update.json"])
def test_the_command_ends_with_1_and_one_line_for_each_damaged_file(copy, files):
    whole = {path: path.read_bytes() for path in sorted(copy.run.glob(files))[:2]}
    for path, data in whole.items():
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = copy.command("verify")
    for path, data in whole.items():
        path.write_bytes(data)
    assert found.code == 1
    assert len(found.output.splitlines()) == len(whole) == 2
    names = [path.relative_to(copy.run).with_suffix("").as_posix().partition("/")[2] for path in whole]
    assert all(name in found.output for name in names)
    assert copy.command("verify").code == 0


def test_files_of_editors_and_file_managers_are_ignored_by_name(copy):
    plan, bundle = (
        "manifests/it-0002/plan.json",
        next(copy.run.glob("policies/*/bundle.json")).parent.relative_to(copy.run),
    )
    strays = [
        ".DS_Store",
        f"{plan}~",
        f"{plan}.bak",
        "manifests/.nfs0001",
        f"{bundle}/.DS_Store",
        "lease/000001.json.orig",
    ]
    for name in strays:
        (copy.run / name).write_text("nobody's")
    shown = copy.command("show", "--json")
    verified = copy.command("verify")
    for name in strays:
        (copy.run / name).unlink()
    assert (shown.code, verified.code) == (0, 0), shown.output + verified.output
    assert verified.output.splitlines() == [
        "run tiny: every digest and every invariant holds",
        *(f"ignored {name}: this file does not belong to the run" for name in sorted(strays)),
    ]


def test_an_extra_python_file_in_a_bundle_is_damage(copy):
    more = next(copy.run.glob("policies/*/bundle.json")).with_name("modeling.py")
    more.write_text("import os")
    problems = problems_of(copy)
    more.unlink()
    assert "modeling.py" in problems
