"""The points of a sweep: which there are, how their runs are called, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.cli.app import main
from infra.errors import BadInput
from infra.store.runs import create_run
from tasks.config.run import load_config, override_config
from tasks.config.sweep import read_points, sweep_points
from tasks.views.sweep import swept_run


def named(*grids: str, listed: tuple[dict[str, str], ...] = ()) -> list[str]:
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


def test_a_list_is_taken_as_it_is_and_multiplied_by_a_grid():
    listed = ({"seed": "1"}, {"rollout.prompts": "4"})
    assert named(listed=listed) == ["demo.seed-1", "demo.prompts-4"]
    assert named("iterations=1,2", listed=listed)[:2] == ["demo.seed-1.iterations-1", "demo.seed-1.iterations-2"]


def test_commas_in_quotes_lists_and_tables_part_no_values():
    points = sweep_points("demo", ["""scoring.rewards=[{kind="math"},{kind="numeric"}],[{kind="math"}]"""], [])
    assert [p.values["scoring.rewards"] for p in points] == ['[{kind="math"},{kind="numeric"}]', '[{kind="math"}]']


def test_keys_of_one_last_name_are_told_apart_by_their_whole_names():
    assert named("update.dtype=float32", "rollout.engine.dtype=a,b", "policy.dtype=c,d")[0] == (
        "demo.rollout.engine.dtype-a.policy.dtype-c"
    )


@given(
    st.lists(st.text("aZ/ .,_-1e\u00e9", min_size=1, max_size=90).map(json.dumps), min_size=2, max_size=6, unique=True)
)
def test_whatever_the_values_each_name_is_one_of_a_run_and_its_own(values):
    points = sweep_points("demo", [], [{"data.path": value} for value in values])
    assert len({point.name for point in points}) == len(values)
    for point in points:
        assert override_config({}, [f"name={json.dumps(point.name)}"], source="here").name == point.name


def test_a_points_name_depends_on_its_values_alone():
    assert named("data.path=/a/B,/c", "seed=1,2")[0] == named("data.path=/c,/a/B", "seed=1,2")[2]


@pytest.mark.parametrize("suffix", ["jsonl", "toml"])
def test_a_list_holds_dotted_keys_or_tables(suffix, tmp_path):
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
    [reward] = override_config({}, [f"scoring.rewards={second['scoring.rewards']}"], source="here").scoring.rewards
    assert reward.kind == "math"
    assert second["warmup"] == ("" if suffix == "jsonl" else '""')


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", "a.jsonl", "a.jsonl:1: not a JSON line: "),
        ("[1]", "a.jsonl", "a.jsonl:1: expected a table of keys and values, found [1]"),
        ("\n", "a.jsonl", "--list a.jsonl: expected points, found none"),
        ('{"name": "x"}', "a.jsonl", "a.jsonl:1: name is the sweep's own"),
        ("seed = 1", "a.toml", "--list a.toml: expected [[points]] alone, found seed"),
        ("seed =", "a.toml", "--list a.toml: cannot be read: "),
    ],
)
def test_a_list_that_is_none_is_refused_by_its_place(content, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    with pytest.raises(BadInput) as refused:
        read_points(Path(name))
    assert str(refused.value).startswith(message)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Give the command; return the one line with which it refuses, and leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('name = "job"\n')

    def give(*arguments: str) -> str:
        assert main(["sweep", "job.toml", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), [path.name for path in tmp_path.iterdir()]) == ("", 1, ["job.toml"])
        return err.removeprefix("rheostat: ")

    return give


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "sweep: expected a key with several values, such as seed=0,1, or different points in --list FILE"),
        (("seed=1",), "sweep: expected a key with several values"),
        (("seed",), "sweep 'seed': expected dotted.key=value,value, such as update.learning_rate=1e-6,3e-6"),
        (("seed=1,,2",), "sweep 'seed=1,,2': expected dotted.key=value,value"),
        (("seed=1,2", "seed=3"), "sweep: 'seed' has values twice: expected one list of them"),
        (("seed=1,1,2",), "sweep: expected different points, found seed=1 twice"),
        (("name=a,b",), "sweep 'name=a,b': name is the sweep's own: runs are named after their values, in one store"),
        (("seed=1,2", "--limit", "0"), "--limit 0: expected at least 1 run at a time"),
        (("seed=1,2", "--list", "none.jsonl"), "--list none.jsonl: cannot be read: No such file or directory"),
        (("sed=1,2",), "job.toml: unknown key 'sed'; did you mean 'seed'?"),
        (("rollout.group_size=2,true",), "job.toml: rollout.group_size: expected an integer, got True"),
        (("seed=1,2", "--limti", "2"), "unrecognized arguments: --limti; did you mean '--limit'?"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_begins(arguments, message, refused):
    assert refused(*arguments).startswith(message)


def test_a_table_says_how_far_runs_are_and_starts_none(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('name = "job"\n')
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


def test_a_run_that_failed_says_why(tmp_path):
    config = override_config({}, [f"store={tmp_path}", "name=job"], source="here")
    run = swept_run(config, {"seed": "1"}, error="no such file")
    assert (run.status, run.error, run.accuracy) == ("failed", "no such file", None)
