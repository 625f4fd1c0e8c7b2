"""The points of a sweep: their number, the names of their runs, and refused sweeps."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat.flows.cli.app import main
from rheostat.infra.store.runs import create_run
from rheostat.tasks.config.documents import toml_value
from rheostat.tasks.config.run import load_config, override_config
from rheostat.tasks.config.sweep import read_points, sweep_points
from rheostat.tasks.views.sweep import swept_run
from tests.support.demos import ARITHMETIC


def run_names(*grids: str, listed: tuple[dict[str, str], ...] = ()) -> list[str]:
    return [point.name for point in sweep_points("demo", grids, listed)]


def test_a_grid_is_the_product_of_its_values_and_a_single_value_is_for_all_points():
    points = sweep_points("demo", ["update.learning_rate=1e-3,3e-3", "iterations=2", "seed=0,1"], [])
    assert [point.name for point in points] == [
        "demo.learning_rate-1e-3.seed-0",
        "demo.learning_rate-1e-3.seed-1",
        "demo.learning_rate-3e-3.seed-0",
        "demo.learning_rate-3e-3.seed-1",
    ]
    assert points[2].overrides == ("update.learning_rate=3e-3", "iterations=2", "seed=0")


def test_listed_points_are_combined_with_every_point_of_a_grid():
    listed = ({"seed": "1"}, {"rollout.prompts": "4"})
    assert run_names(listed=listed) == ["demo.seed-1", "demo.prompts-4"]
    assert run_names("iterations=1,2", listed=listed)[:2] == ["demo.seed-1.iterations-1", "demo.seed-1.iterations-2"]


def test_commas_in_quotes_lists_and_tables_do_not_separate_values():
    points = sweep_points("demo", ["""scoring.rewards=[{kind="math"},{kind="numeric"}],[{kind="math"}]"""], [])
    assert [p.values["scoring.rewards"] for p in points] == ['[{kind="math"},{kind="numeric"}]', '[{kind="math"}]']


def test_keys_with_the_same_last_part_appear_in_run_names_in_full():
    assert run_names("update.dtype=float32", "rollout.engine.dtype=a,b", "policy.dtype=c,d")[0] == (
        "demo.rollout.engine.dtype-a.policy.dtype-c"
    )


@given(
    st.lists(st.text("aZ/ .,_-1e\u00e9", min_size=1, max_size=90).map(json.dumps), min_size=2, max_size=6, unique=True)
)
def test_every_point_has_a_unique_and_valid_run_name(values):
    points = sweep_points("demo", [], [{"data.path": value} for value in values])
    assert len({point.name for point in points}) == len(values)
    for point in points:
        assert (
            override_config({"data": ARITHMETIC}, [f"name={json.dumps(point.name)}"], source="here").name == point.name
        )


def test_a_points_name_depends_on_its_values_alone():
    assert run_names("data.path=/a/B,/c", "seed=1,2")[0] == run_names("data.path=/c,/a/B", "seed=1,2")[2]


@pytest.mark.parametrize("suffix", ["jsonl", "toml"])
def test_a_list_contains_dotted_keys_or_tables(suffix, tmp_path):
    path = tmp_path / f"points.{suffix}"
    texts = {
        "jsonl": '{"update.learning_rate": 1e-3, "report": false}\n\n'
        '{"update": {"learning_rate": 0.1}, "warmup": null, "scoring": {"rewards": [{"kind": "math"}]}}\n',
        "toml": '[[points]]\nupdate.learning_rate = 1e-3\nreport = false\n[[points]]\nwarmup = ""\n'
        '[points.update]\nlearning_rate = 0.1\n[[points.scoring.rewards]]\nkind = "math"\n',
    }
    path.write_text(texts[suffix])
    first, second = read_points(path)
    assert first == {"update.learning_rate": "0.001", "report": "false"}
    assert second["update.learning_rate"] == "0.1"
    [reward] = override_config(
        {"data": ARITHMETIC}, [f"scoring.rewards={second['scoring.rewards']}"], source="here"
    ).scoring.rewards
    assert reward.kind == "math"
    assert second["warmup"] == ("" if suffix == "jsonl" else '""')


def test_the_table_of_a_sweep_shows_the_status_of_its_runs_and_starts_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(f'name = "job"\ndata = {toml_value(ARITHMETIC)}\n')
    begun = load_config(Path("job.toml"), ["seed=1", "name=job.seed-1"])
    create_run(begun.store, begun.name, begun.identity())
    assert main(["sweep", "job.toml", "seed=1,2", "--table"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "seed", "held-out", "accuracy", "took", "status"]
    assert first.split() == ["job.seed-1", "1", "-", "-", "stopped"]
    assert second.split() == ["job.seed-2", "2", "-", "-", "not", "begun"]
    assert main(["sweep", "job.toml", "seed=1,2", "--table", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["run"], run["values"], run["status"]) for run in found] == [
        ("job.seed-1", {"seed": "1"}, "stopped"),
        ("job.seed-2", {"seed": "2"}, "not begun"),
    ]


def test_a_failed_run_of_a_sweep_has_its_error(tmp_path):
    config = override_config({"data": ARITHMETIC}, [f"store={tmp_path}", "name=job"], source="here")
    run = swept_run(config, {"seed": "1"}, error="no such file")
    assert (run.status, run.error, run.accuracy) == ("failed", "no such file", None)
