"""Files of each kind of tracker, read back after points were written."""

import pytest
from pydantic import TypeAdapter

from rheostat.infra.errors import BadInput
from rheostat.infra.trackers import config
from rheostat.infra.trackers.config import TensorBoardTracker, TrackerConfig, check_tracker
from rheostat.infra.trackers.records import Point, Product, Subject, TextTable, flatten_config
from rheostat.infra.trackers.tensorboard import open_mirror
from tests.support.trackers import FileTracker, tensorboard_series, tensorboard_values

SUBJECT = Subject("demo", "demo-0123abcd-20260101000000", {"seed": 1, "data": {"kind": "file", "path": "a.jsonl"}})
TABLE = TextTable(("reward", "completion"), ((1.0, "4 + 4 = 8\n#### 8"), (None, "<script>alert(1)</script> | [a](b)")))


def iteration(step: int, **scalars: float) -> Point:
    return Point("iteration", step, {"credit/reward_mean": step / 4, **scalars}, lambda: TABLE)


EVALUATION = Point("evaluation", 0, {"eval/accuracy": 0.25, "eval/low": 0.125})
POINTS = [EVALUATION, iteration(1), iteration(2)]


def feed_points(mirror, points) -> int:
    """Write points as a run does, and return the number of steps with missing tags."""
    missing = [point for point in points if mirror.lacks(point)]
    for point in missing:
        mirror.write(point, None if point.samples is None else point.samples())
    mirror.close(None)
    return len(missing)


def test_tensorboard_has_every_scalar_once_and_samples_as_text_however_often_a_run_is_mirrored(tmp_path):
    settings = TensorBoardTracker(directory=str(tmp_path))
    assert feed_points(open_mirror(SUBJECT, settings), POINTS[:2]) == 2
    assert feed_points(open_mirror(SUBJECT, settings), POINTS) == 1
    assert feed_points(open_mirror(SUBJECT, settings), POINTS) == 0
    found = tensorboard_series(tmp_path / SUBJECT.identity)
    assert set(found.values()) == {1}
    values = {(tag, step): value for tag, step, value in tensorboard_values(tmp_path / SUBJECT.identity)}
    assert {key: value for key, value in values.items() if isinstance(value, float)} == {
        ("eval/accuracy", 0): 0.25, ("eval/low", 0): 0.125,
        ("credit/reward_mean", 1): 0.25, ("credit/reward_mean", 2): 0.5,
    }  # fmt: skip
    texts = {key for key, value in values.items() if isinstance(value, str)}
    assert texts == {("config/text_summary", 0), ("samples/text_summary", 1), ("samples/text_summary", 2)}
    assert "| data.path | a.jsonl |" in str(values["config/text_summary", 0])


def test_a_new_tag_is_added_to_existing_steps(tmp_path):
    settings = TensorBoardTracker(directory=str(tmp_path))
    feed_points(open_mirror(SUBJECT, settings), [iteration(1)])
    feed_points(open_mirror(SUBJECT, settings), [iteration(1, tokens_per_second=9.0)])
    found = tensorboard_series(tmp_path / SUBJECT.identity)
    assert found["tokens_per_second", 1] == found["credit/reward_mean", 1] == found["samples/text_summary", 1] == 1


def test_a_record_torn_by_a_killed_writer_is_written_again(tmp_path):
    settings = TensorBoardTracker(directory=str(tmp_path))
    feed_points(open_mirror(SUBJECT, settings), [EVALUATION])
    [file] = (tmp_path / SUBJECT.identity).iterdir()
    file.write_bytes(file.read_bytes()[:-7])
    feed_points(open_mirror(SUBJECT, settings), [EVALUATION])
    file.unlink()
    assert set(tensorboard_series(tmp_path / SUBJECT.identity)) == {("eval/low", 0)}


def test_completions_are_shown_as_text_in_a_table():
    assert TABLE.markdown().splitlines()[2:] == [
        "| 1 | 4 + 4 = 8<br>#### 8 |",
        "|  | &lt;script&gt;alert(1)&lt;/script&gt; &#124; &#91;a](b) |",
    ]


def test_a_configuration_is_flattened_to_dotted_keys_also_for_tables_in_lists():
    nested = {"scoring": {"rewards": [{"kind": "math"}]}, "tags": ["a", "b"], "warmup": None, "empty": {}}
    assert dict(flatten_config(nested)) == {
        "scoring.rewards.0.kind": "math", "tags": "['a', 'b']", "warmup": "None", "empty": "{}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "requirement"),
    [("tensorboard", "tensorboardX>=2"), ("mlflow", "mlflow-skinny>=3.17,<4"), ("wandb", "wandb>=0.31,<1")],
)
def test_a_missing_package_is_reported_with_the_command_that_installs_it(kind, requirement, monkeypatch):
    tracker = TypeAdapter(TrackerConfig).validate_python({"kind": kind})
    check_tracker(tracker)
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(BadInput, match=f"'{kind}'.* pip install '{requirement}"):
        check_tracker(tracker)


def test_a_user_tracker_must_accept_the_arguments_of_its_call():
    asked = {"kind": "target", "target": "tests.support.trackers:FileTracker", "options": {"path": "x"}}
    tracker = TypeAdapter(TrackerConfig).validate_python(asked)
    assert isinstance(tracker, FileTracker)
    check_tracker(tracker)

    class Odd(FileTracker):
        implementation = "tests.support.trackers:tensorboard_series"

    with pytest.raises(BadInput, match=r"is called with the arguments \(subject, settings\)"):
        check_tracker(Odd(path="x"))


@pytest.mark.system
def test_mlflow_has_every_step_once_the_samples_as_tables_and_the_last_policy_in_its_registry(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    from rheostat.infra.trackers.config import MlflowTracker
    from rheostat.infra.trackers.mlflow import ALIAS, open_mirror

    monkeypatch.chdir(tmp_path)
    settings = MlflowTracker(uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="tests", register="assistant")
    assert feed_points(open_mirror(SUBJECT, settings), POINTS[:2]) == 2
    assert feed_points(open_mirror(SUBJECT, settings), POINTS) == 1
    mirror = open_mirror(SUBJECT, settings)
    assert not any(map(mirror.lacks, POINTS))
    for _ in range(2):
        mirror.close(Product(2, "0" * 64, "file:///runs/demo/policies/00"))
    client = MlflowClient(settings.uri)
    [experiment] = [each for each in client.search_experiments() if each.name == "tests"]
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params == {"seed": "1", "data.kind": "file", "data.path": "a.jsonl"}
    history = client.get_metric_history(run.info.run_id, "credit/reward_mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.25), (2, 0.5)]
    assert len(client.get_metric_history(run.info.run_id, "eval/accuracy")) == 1
    files = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert files == ["samples/000001.json", "samples/000002.json"]
    [version] = client.search_model_versions("name = 'assistant'")
    assert client.get_model_version_by_alias("assistant", ALIAS).version == version.version
    assert (version.source, version.run_id) == ("file:///runs/demo/policies/00", run.info.run_id)


@pytest.mark.system
def test_an_offline_run_of_wandb_continues_where_its_files_end(tmp_path):
    from rheostat.infra.trackers.config import WandbTracker
    from rheostat.infra.trackers.wandb import open_mirror, rows_of

    settings = WandbTracker(mode="offline", directory=str(tmp_path))
    assert feed_points(open_mirror(SUBJECT, settings), POINTS[:2]) == 2
    after = Point("evaluation", 1, {"eval/accuracy": 0.5})
    assert feed_points(open_mirror(SUBJECT, settings), [*POINTS[:2], after, POINTS[2]]) == 2
    assert feed_points(open_mirror(SUBJECT, settings), [*POINTS[:2], after, POINTS[2]]) == 0
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{SUBJECT.identity}.wandb"))
    rows = [row for file in files for row in rows_of(file)]
    steps = [(row["_step"], row.get("evaluation"), row.get("iteration")) for row in rows]
    assert steps == [(0, 0, None), (1, None, 1), (2, 1, 2)], "an evaluation shares the row of what follows it"
    assert [row["credit/reward_mean"] for row in rows[1:]] == [0.25, 0.5]
    assert [row["eval/accuracy"] for row in rows if "evaluation" in row] == [0.25, 0.5]
    tables = list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))
    assert len(tables) == 2 and all("<script>" in table.read_text() for table in tables)
