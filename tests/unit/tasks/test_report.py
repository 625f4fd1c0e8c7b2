"""The report of a run: every number is from the store, a policy's text is escaped, and the report is one file."""

import json
import re
import shutil
import tomllib
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.demos import DEMOS
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.local import LocalStore
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import create_run
from rheostat.tasks.config.documents import place_document
from rheostat.tasks.config.run import load_config, override_config
from rheostat.tasks.run.keys import DPO, PROMPTS, SFT, StageKey, evaluation_key, reward_model_role
from rheostat.tasks.views import run_list
from rheostat.tasks.views.report.comparison import compare_runs, comparison_page
from rheostat.tasks.views.report.numbers import numbers_of
from rheostat.tasks.views.report.page import toml
from rheostat.tasks.views.report.run import report_page
from rheostat.tasks.views.report.samples import CHARACTERS, spread
from rheostat.tasks.views.report.sections import missing
from rheostat.tasks.views.run_list import list_run_lines
from rheostat.tasks.views.run_progress import ProgressReader
from rheostat.tasks.views.runs import describe_run
from tests.support.demos import ARITHMETIC
from tests.support.in_process import run_command
from tests.support.jobs import ROOT
from tests.support.long_runs import write_long_run

HOSTILE = (
    "<script>alert(1)</script>",
    "</script></svg><img src=x onerror=alert(2)>",
    "<!-- \u2028 &lt;b&gt; \x00",
    "naïve 日本 🙂",
    "a" * CHARACTERS + "the middle" + "z" * CHARACTERS,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Store with two runs whose completions are hostile texts."""
    place = tmp_path_factory.mktemp("store")
    write_long_run(place, name="long", iterations=4, group=4, texts=HOSTILE)
    write_long_run(place, name="other", iterations=3, group=3, texts=HOSTILE)
    return str(place)


@pytest.fixture(scope="module")
def html(store):
    return report_page(store, "long")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        ("report", "long", "--to", "HOME/page.html"),
        ("show", "long"),
        ("compare", "long", "other"),
        ("plot", "long", "--to", "HOME/curves.svg"),
        ("watch", "long"),
        ("rollouts", "long"),
        ("export", "long"),
    ],
    ids=lambda words: words[0],
)
def test_a_run_that_is_deleted_while_a_command_reads_it_is_named(store, tmp_path, monkeypatch, words):
    shutil.copytree(store, tmp_path / "store")
    list_names = LocalStore.children

    def delete_after_first_listing(self, folder):
        names = list_names(self, folder)
        shutil.rmtree(tmp_path / "store/long", ignore_errors=True)
        return names

    monkeypatch.setattr(LocalStore, "children", delete_after_first_listing)
    ended = run_command(*(word.replace("HOME", str(tmp_path)) for word in words), "--store", str(tmp_path / "store"))
    where = (tmp_path / "store").as_uri()
    message = f"rheostat: run 'long' was deleted from the store {where} while it was read. Choose another run\n"
    assert (ended.code, ended.output) == (1, message)
    assert not list(tmp_path.glob("*.*"))


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(("moment", "limit"), [("list_runs", None), ("list_runs", 1), ("_read_evaluations", None)])
def test_a_run_that_is_deleted_while_runs_are_listed_is_omitted(store, tmp_path, monkeypatch, moment, limit):
    shutil.copytree(store, tmp_path / "store")
    original = getattr(run_list, moment)

    def delete_afterwards(*arguments):
        result = original(*arguments)
        shutil.rmtree(tmp_path / "store/long", ignore_errors=True)
        return result

    monkeypatch.setattr(run_list, moment, delete_afterwards)
    lines, _ = run_list.list_run_lines(str(tmp_path / "store"), limit=limit)
    assert [line.run for line in lines] == ["other"]


def test_a_run_that_is_deleted_in_part_between_two_reads_is_named(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    watcher = ProgressReader(str(tmp_path / "store"), "long")
    watcher.read_progress()
    shutil.rmtree(tmp_path / "store/long/manifests/it-0002")
    with pytest.raises(Damaged, match="run 'long' was deleted"):
        watcher.read_progress()


def data_of(html):
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def test_every_number_on_the_page_equals_the_output_of_show(store, html):
    columns, told = data_of(html)["columns"], json.loads(describe_run(store, "long").model_dump_json())
    for accuracy in told["evaluations"]:
        assert columns["held-out accuracy"][accuracy["number"]] == accuracy["mean"]
        assert columns["held-out accuracy, high"][accuracy["number"]] == accuracy["high"]
    compared = 0
    for report in told["iterations"]:
        for name, value in numbers_of(report):
            assert columns.get(name, [0] * 9)[report["iteration"]] == value, name
            compared += name in columns
    assert compared > 60
    sealed = {name for name in columns if name.startswith(("credit/", "update/"))}
    assert {"credit/truncated_fraction", "update/entropy", "credit/term_short_mean"} <= sealed


def test_completions_are_in_the_page_only_as_data(html):
    texts = {completion["text"] for group in data_of(html)["groups"] for completion in group["completions"]}
    assert set(HOSTILE[:4]) <= texts
    assert html.count("<script") == 2 and html.count("</script>") == 2
    assert "<img" not in html and "onerror=alert(2)>" in html


def test_a_page_names_its_one_script_and_no_address(html):
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-", html)
    addresses = set(re.findall(r"https?://[\w./-]+", html))
    assert addresses == {"http://www.w3.org/1999/xlink", "http://www.w3.org/2000/svg"}, "names, which nobody asks"
    assert not re.search(r"<link|src=\"http|@import|url\((?!#)", html)


def test_the_middle_of_a_long_text_is_omitted_at_token_boundaries(html):
    every = [each for group in data_of(html)["groups"] for each in group["completions"]]
    cut = next(each for each in every if "cut" in each)
    begin, count = cut["cut"]
    assert cut["text"][:begin] == "a" * begin and len(cut["text"]) + count == len(HOSTILE[4])
    assert "the middle" not in cut["text"] and cut["tokens"] == len(HOSTILE[4])


def test_tokens_add_up_to_the_text_and_have_advantages_and_log_probs(html):
    for group in (each for each in data_of(html)["groups"] if each["batch"].startswith("it-")):
        for completion in group["completions"]:
            assert sum(completion["pieces"]) == len(completion["text"])
            assert len(completion["logprobs"]) == len(completion["pieces"])
            assert [sum(count for count, _ in completion["advantages"])] == [len(completion["pieces"])]
            assert {value for _, value in completion["advantages"]} == {completion["terms"]["right"] - 0.5}


def test_the_selection_of_iterations_includes_the_first_and_the_last():
    assert spread(range(1, 1001), 5) == [1, 251, 501, 750, 1000]
    assert spread([3, 4], 5) == [3, 4]


def test_the_configuration_of_a_page_reproduces_the_run(store):
    rewards = [{"kind": "regex", "pattern": '"\\d\x7f\n'}, {"kind": "code", "name": "runs", "weight": 0.5}]
    config = override_config({"name": "x", "data": ARITHMETIC, "scoring": {"rewards": rewards}}, [], source="x")
    again = override_config({"name": "x", **tomllib.loads(toml(config.identity()))}, [], source="page")
    assert again.identity() == config.identity()


def test_a_report_shows_the_rows_that_drop_left_out_but_not_the_blank_completions_of_a_judge(tmp_path):
    run = create_run(str(tmp_path), "x", override_config({"name": "x", "data": ARITHMETIC}, [], source="x").identity())
    results = {
        PROMPTS["train"]: {"prompts": 4, "too_long": 1200, "empty": 2},
        PROMPTS["heldout"]: {"prompts": 4, "too_long": 0},
        SFT: {"chats": 4, "too_long": 3},
        DPO: {"dropped_ties": 5, "dropped_empty": 6, "dropped_too_long": 7, "dropped_mismatched": 8},
        StageKey.reward_model("taste"): {"dropped_ties": 9},
        **{
            StageKey.of(batch, reward_model_role("taste"), 0): {"empty": 10}
            for batch in ("it-0001", evaluation_key(0), evaluation_key(0, policy=SFT), "rescore/strict/it-0001")
        },
    }
    with run.lock():
        for key, metrics in results.items():
            run.commit(Manifest(key=key, metrics=metrics))
    body = missing(run, describe_run(str(tmp_path), "x")).body
    [table] = re.findall(r"\(`drop`\):</p>(.*?</table>)", body, re.DOTALL)
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in table.split("<tr")]
    assert [tuple(row) for row in rows if row] == [
        ("judge-taste/model", "ties", "9"),
        ("policy/dpo", "too_long", "7"),
        ("policy/dpo", "empty", "6"),
        ("policy/dpo", "ties", "5"),
        ("policy/dpo", "mismatched", "8"),
        ("policy/sft", "too_long", "3"),
        ("prompts/train", "too_long", "1,200"),
        ("prompts/train", "empty", "2"),
    ]


CONFIGS = sorted({*ROOT.glob("configs/*.toml"), *DEMOS.glob("*/*.toml")} - {ROOT / "configs/retriever.toml"})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.relative_to(ROOT / "configs"))
def test_a_bundled_configuration_is_valid_named_after_its_file_and_reproduced_by_its_report(path):
    config = load_config(path)
    assert config.name == (path.parent.name if path.stem == "job" else path.stem)
    identity = config.identity()
    document = place_document(toml(identity), path.parent)  # relative paths start next to the job
    again = override_config(document | {"name": "x", "iterations": 3}, [], source="page")
    assert again.identity() == identity | ({"iterations": 3} if "iterations" in identity else {})


@pytest.mark.thorough
def test_a_comparison_names_settings_that_differ_and_pairs_problems(store):
    compared = compare_runs(store, ["long", "other"])
    assert compared.settings == {"rollout.group_size": {"long": "4", "other": "3"}}
    [pair] = compared.pairs
    assert "there are only 0" in pair.why, "problems that were asked in another number of samples are not the same"
    [same] = compare_runs(store, ["long", "long", "other"]).pairs
    assert same == pair
    html = comparison_page(store, compared)
    assert data_of(html)["columns"]["other: reward"][:4] == [None, 1 / 21, 2 / 22, 3 / 23]
    assert {group["batch"] for group in data_of(html)["groups"]} == {"long eval-0004", "other eval-0003"}
    with pytest.raises(BadInput, match="2 to 6 runs, found 1: long"):
        compare_runs(store, ["long"])


@pytest.mark.thorough
def test_the_commands_write_pages_and_refuse_invalid_output_paths(store, tmp_path, capsys):
    where = ("--store", store)
    assert main(["compare", "long", "other", *where, "--to", str(tmp_path / "both.html")]) == 0
    shown = capsys.readouterr().out
    assert "rollout.group_size     4      3" in shown and "other - long: no paired test: " in shown
    assert "<h1>long and other</h1>" in (tmp_path / "both.html").read_text()
    assert main(["report", "long", *where, "--to", str(tmp_path / "none/page.html")]) == 2
    assert "Name a file in an existing directory" in capsys.readouterr().err
    assert main(["report", "lomg", *where, "--to", str(tmp_path / "page.html")]) == 2
    assert "did you mean 'long'" in capsys.readouterr().err
    assert main(["compare", "long", *where]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["both.html"]


def test_the_list_of_runs_shows_the_status_of_each_run(tmp_path):
    store = str(tmp_path)
    run = write_long_run(tmp_path, iterations=2)
    ([line], _) = list_run_lines(store)
    assert (line.status, line.algorithm, line.best, line.held_by) == ("done", "grpo", 2 / 22, "")
    with run.lock():
        ([line], _) = list_run_lines(store)
        assert line.status == "running" and line.held_by.startswith("process ")
    assert list_run_lines(store)[0][0].status == "done", "who held it ended in order"
    (tmp_path / "long/manifests/eval-0002/summary.json").unlink()
    assert list_run_lines(store)[0][0].status == "stopped"
    (tmp_path / "long/lock").write_text('{"pid": 1, "host": "gone"}')
    ([line], _) = list_run_lines(store)
    assert (line.status, line.held_by) == ("crashed", "process 1 on gone")
    assert (tmp_path / "long/lock").read_text() == '{"pid": 1, "host": "gone"}', "looking changes nothing"


def test_a_long_list_of_runs_can_be_cut_to_the_newest(tmp_path, capsys, monkeypatch):
    for day, name in enumerate("cab", start=1):
        now = datetime(2026, 11, day, tzinfo=UTC)
        monkeypatch.setattr("rheostat.infra.store.run_record.datetime", SimpleNamespace(now=lambda zone, now=now: now))
        create_run(str(tmp_path), name, {})
    (tmp_path / "c/run.json").write_text("torn")
    lines, num_runs = list_run_lines(str(tmp_path), limit=2)
    assert [(line.run, line.status) for line in lines] == [("b", "stopped"), ("c", "damaged")] and num_runs == 3
    assert main(["runs", "--limit", "2", "--store", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the newest 2 of 3 runs"
