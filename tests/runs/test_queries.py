"""SQL queries on runs: each view compared with its sources, and the queries of docs/queries.md."""

import contextlib
import io
import json
import re
import sys
from statistics import fmean

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rheostat.tasks.views.export
import rheostat.tasks.views.tables
from rheostat.flows.cli.app import main
from rheostat.flows.cli.output import answer_rows
from rheostat.infra.errors import BadInput
from rheostat.infra.terminal import table
from rheostat.tasks.views.query import VIEWS, query_runs
from rheostat.tasks.views.tables import CREDIT
from tests.support.chat_server import chat_server, reply_with
from tests.support.in_process import InProcessJob
from tests.support.jobs import ROOT, bundles_of, files_of, manifest_of, manifests_of
from tests.support.stored_runs import rows_of

pytestmark = pytest.mark.timeout(1200)

ANSWERS = ("yes", "no", "perhaps")
QUESTIONS = re.findall(r"^```sql\n(.*?)^```$", (ROOT / "docs/queries.md").read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def queried_run(tmp_path_factory, prefect_api):
    """Run with a rule and a judge of two votes, rescored as `short` and recredited as `rloo`."""
    job, threads = InProcessJob(tmp_path_factory.mktemp("asked"), prefect_api), "pools.cluster=threads"
    with chat_server(lambda queried_run, before: reply_with(ANSWERS[queried_run.body["seed"] % 3])) as server:
        job.train(
            "scoring.rewards=[{kind = 'target', target = 'tests.support.rewards:even', weight = 0.5},"
            " {kind = 'judge', name = 'quality', votes = 2, max_invalid = 1.0,"
            " verdict = {kind = 'choice', constrained = false}, model = {kind = 'endpoint', model = 'judge',"
            f" base_url = '{server.url}', allowed_hosts = ['127.0.0.1'], allow_private = true}}}}]",
            "iterations=2",
            "scoring.max_missing=1.0",
            "budget.prices.judges.quality={per_thousand_calls=2, per_million_tokens_read=10}",
            "budget.prices.per_worker_hour=3600",
        )
    lengths = 'rewards=[{kind="target",target="tests.support.rewards:length",weight=0.1}]'
    for given in (
        ("rescore", "--rewards", lengths, "--as", "short"),
        ("recredit", "--algorithm", "rloo", "--as", "rloo"),
    ):
        ended = job.command(given[0], *given[1:], threads)
        assert ended.code == 0, ended.output
    return job


def rows(job, sql, *names):
    return query_runs(str(job.store), sql, names=names).to_pylist()


@pytest.mark.system
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda text: " ".join(text.split())[:60])
def test_every_query_in_the_documentation_returns_rows(queried_run, question):
    answer = rows(queried_run, question)
    assert answer
    sys.stdout.write(f"{question}{table(answer_rows(answer))}\n")


def test_the_documentation_has_ten_queries_that_use_every_view():
    assert len(QUESTIONS) >= 10
    assert all(any(re.search(rf"\b{view}\b", question) for question in QUESTIONS) for view in VIEWS)


@pytest.mark.system
def test_the_view_of_scores_equals_the_score_shards_with_their_verdicts(queried_run):
    keys = [f"it-{number:04d}/scoring/{shard:04d}" for number in (1, 2) for shard in range(3)]
    own = rows(
        queried_run, "select term, value, reward, verdicts from scores where rescoring is null and term = 'quality'"
    )
    stored = rows_of(queried_run, *keys)
    assert [(row["value"], row["reward"]) for row in own] == [(row["reward_quality"], row["reward"]) for row in stored]
    verdicts = rows_of(queried_run, *(key.replace("scoring", "judge-quality") for key in keys))
    flat = [{name: row[name] for name in ("vote", "attempt", "text", "value")} for row in verdicts]
    told = [{name: each[name] for name in flat[0]} for row in own for each in row["verdicts"]]
    assert told == flat and len({row["attempt"] for row in flat}) == 2, "invalid answers are asked for again"
    again = rows(queried_run, "select * from scores where rescoring = 'short'")
    stored = rows_of(queried_run, *(f"rescore/short/{key}" for key in keys))
    assert [row["value"] for row in again] == [row["reward_target"] for row in stored]
    assert {row["term"] for row in again} == {"target"} and all(row["verdicts"] is None for row in again)


@pytest.mark.system
def test_an_exported_rescoring_has_separate_groups_and_no_advantages(queried_run):
    ended = queried_run.command("export", "--scores", "short", "--json")
    assert ended.code == 0, ended.output
    for path in json.loads(ended.output):
        rows = pq.read_table(path).to_pylist()
        assert "advantages" not in rows[0]
        for row in rows:
            rewards = [other["reward"] for other in rows if other["prompt_row"] == row["prompt_row"]]
            assert row["group_reward_mean"] == pytest.approx(fmean(rewards))
            assert row["group_informative"] == (len({*rewards}) > 1)


@pytest.mark.system
def test_the_costs_of_a_judge_count_its_verdicts(queried_run):
    (calls,) = rows(queried_run, "select sum(cost_judge_calls) as calls from iterations")
    (verdicts,) = rows(
        queried_run,
        "with votes as (select unnest(verdicts) as vote from scores) select count(vote.text) as answers from votes",
    )
    assert calls["calls"] == verdicts["answers"] > 48 * 2
    (spent,) = rows(queried_run, "select sum(cost_price) as price, sum(cost_worker_seconds) as held from iterations")
    # 2 per 1,000 calls, 10 per 1,000,000 of the 5 tokens that the server says it read, 3,600 an hour of a worker
    assert spent["price"] == pytest.approx(int(calls["calls"]) * (0.002 + 5 * 10 / 1e6) + spent["held"])


@pytest.mark.system
@pytest.mark.parametrize(("recredit", "prefix"), [("is null", ""), ("= 'rloo'", "recredit/rloo/")])
def test_the_view_of_samples_equals_the_sample_shards(queried_run, recredit, prefix):
    told = rows(queried_run, f"select * from samples where recredit {recredit}")
    stored = rows_of(queried_run, *(f"{prefix}it-{number:04d}/credit" for number in (1, 2)))
    assert len(told) == len(stored) > 0
    for row, sample in zip(told, stored, strict=True):
        advantages = sample["advantages"]
        assert (row["prompt_row"], row["sample"]) == (sample["prompt_row"], sample["sample"])
        assert (row["prompt_tokens"], row["tokens"]) == (sample["num_prompt_tokens"], len(advantages))
        assert row["advantage_mean"] == pytest.approx(fmean(advantages))
        assert (row["advantage_min"], row["advantage_max"]) == (min(advantages), max(advantages))


def test_the_view_of_samples_omits_tokens_of_the_environment():
    samples = pa.table({
        "prompt_row": [0], "sample": [0], "num_prompt_tokens": [1],
        "advantages": [[1.0, 0.0, 3.0]], "staleness": [[0, -1, 2]],
    })  # fmt: skip
    with duckdb.connect() as database:
        database.register("samples", samples)
        (row,) = database.execute(CREDIT, {"run": "r", "iteration": 1, "name": None}).to_arrow_table().to_pylist()
    assert (row["tokens"], row["advantage_mean"], row["advantage_min"], row["staleness"]) == (2, 2.0, 1.0, 2)


def test_the_view_of_policies_shows_which_versions_are_stored(reference):
    versions = rows(reference, "select * from policies order by version")
    manifests = manifests_of(reference.run)
    assert [row["iteration"] for row in versions] == [None, 1, 2, 3]
    assert [row["is_there"] for row in versions] == [True, False, True, True], "retention keeps the newest two"
    assert [row["parent"] for row in versions] == [None, *(row["policy"] for row in versions[:-1])]
    sealed = rows(reference, "select policy from iterations order by iteration")
    assert [row["policy"] for row in versions[1:]] == [row["policy"] for row in sealed]
    for row, key in zip(
        versions, ("policy/initial", "it-0001/update", "it-0002/update", "it-0003/update"), strict=True
    ):
        weights = manifest_of(reference.run, key)["bundles"]["weights"]
        assert (row["policy"], row["bytes"]) == (weights["digest"], weights["bytes"])
        assert (bundles_of(reference.run, key)["weights"] / "bundle.json").exists() == row["is_there"]
    assert manifests_of(reference.run) == manifests


def test_a_query_reads_only_the_views_that_it_names(reference, monkeypatch):
    def refuse(*arguments, **named):
        raise AssertionError("a shard was read")

    for module in (rheostat.tasks.views.tables, rheostat.tasks.views.export):
        monkeypatch.setattr(module, "read_shard", refuse)
    iterations = "select count(*) as count from Iterations join policies using (run, iteration) where run != 'rollouts'"
    assert rows(reference, iterations) == [{"count": 3}]
    for view in ("rollouts", "scores", "samples"):
        with pytest.raises(AssertionError, match="a shard was read"):
            rows(reference, f"select count(*) from {view}")
        with pytest.raises(AssertionError, match="a shard was read"):
            rows(reference, f"pivot {view} on prompt_row using count(*)")


def test_sums_of_whole_numbers_are_printed_as_whole_numbers(reference):
    said = reference.command("rollouts", "--json", "--iteration", "1", "--limit", "99").output
    tokens = sum(sample["tokens"] for sample in json.loads(said))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        sql = "select sum(len(completion_tokens)) as tokens from rollouts where iteration = 1"
        assert main(["query", sql, "--store", str(reference.store), "--json"]) == 0
    assert json.loads(output.getvalue()) == [{"tokens": tokens}]


@pytest.mark.system
def test_a_query_writes_nothing_to_the_store(queried_run):
    before = files_of(queried_run.run)
    rows(
        queried_run, "select count(*) from rollouts, scores, samples, iterations, policies where rollouts.iteration < 0"
    )
    assert files_of(queried_run.run) == before


@pytest.mark.thorough
def test_views_omit_iterations_whose_shards_were_deleted(copied):
    copied.train("retention.rollouts_keep_last=1")
    for view, left in (("rollouts", [3]), ("scores", [3]), ("samples", [3]), ("iterations", [1, 2, 3])):
        found = rows(copied, f"select distinct iteration from {view} order by all")
        assert [row["iteration"] for row in found] == left


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("select * frm rollouts", "syntax error"),
        ("select * from reslts", "(tables: rollouts, scores, samples, iterations, policies)"),
        ("select nothing from policies", '"nothing" not found'),
    ],
)
def test_invalid_sql_is_refused_in_one_line(reference, sql, said):
    with pytest.raises(BadInput) as refused:
        rows(reference, sql)
    assert said in str(refused.value) and "\n" not in str(refused.value)


FORBIDDEN = (
    "copy (select 1) to '{shard}' (use_tmp_file false)",
    "copy rollouts to '{shard}.new'",
    "select 1; copy rollouts to '{shard}.new'",
    "export database '{shard}.new'",
    "attach '{shard}.new'",
    "create persistent secret own (type http)",
    "select * from policies, read_text('{other}')",
    "select * from rollouts where prompt in (select content from read_text('{other}'))",
    "select * from glob('{other}*')",
    "set enable_external_access = true; select * from read_text('{other}')",
    "create table own as select * from read_text('{other}')",
)
"""Queries for other files than those of a view: a file in the store of the view, and a file outside of it."""


def test_a_query_reads_and_writes_no_files_except_those_of_its_views(copied, tmp_path):
    other = tmp_path / "other"
    other.write_text("canary")
    ended = copied.command("export", "--json")
    assert ended.code == 0, ended.output
    shard, *_ = json.loads(ended.output)
    before = files_of(copied.run)
    answered = []
    for forbidden in FORBIDDEN:
        sql = forbidden.format(shard=shard, other=other)
        with contextlib.suppress(BadInput):
            answered.append((sql, rows(copied, sql)))
    assert answered == []
    assert files_of(copied.run) == before
    assert rows(copied, "select count(*) > 0 as some from rollouts") == [{"some": True}]
