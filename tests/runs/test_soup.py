"""Soups: their records contain what was trained and evaluated, and a killed soup continues where it ended."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
from safetensors.torch import load_file

from rheostat.flows.cli.app import main
from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.checksums import seal
from rheostat.infra.store.runs import list_runs, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.soup.front import measure_front
from rheostat.tasks.config.run import RunConfig, load_config
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import StageKey, evaluation_key
from rheostat.tasks.soup.record import SoupRecord, latest_records, soup_policy, verify_soup
from tests.support.chaos import run_driver
from tests.support.chaos_families import SMALLEST_SOUP
from tests.support.demos import demo_job
from tests.support.in_process import InProcessJob
from tests.support.jobs import Fault, Job, manifests_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
WEIGHTS = "model.safetensors"
SMALL = ("iterations=2", "warmup.steps=20", "rollout.prompts=4", "rollout.shard_prompts=4", "evaluation.problems=4")
SMALL_SOUP = ("soup.grid=3", "soup.statistics_prompts=4")


def tiny(store: str, *overrides: str) -> RunConfig:
    """Settings of the smallest job."""
    return load_config(demo_job("soup"), [*SMALL, *SMALL_SOUP, f"store={json.dumps(store)}", *overrides])


class Killed(Exception):
    """Exception that replaces the end of the process."""


@dataclass
class Made:
    """Soup, and the policies that were evaluated for it, in order."""

    job: InProcessJob
    evaluated: list[str]
    record: SoupRecord
    again: SoupRecord
    """Return what the same command reports afterwards."""

    @property
    def store(self) -> str:
        return str(self.job.store)


@pytest.fixture(scope="module")
def soup(tmp_path_factory, prefect_api) -> Made:
    """Soup that searches for β, has experts at its corners, and is killed once, within the search."""
    import rheostat.flows.soup

    job, evaluated, whole = InProcessJob(tmp_path_factory.mktemp("soup"), prefect_api), [], rheostat.flows.soup.evaluate
    config = tiny(str(job.store), "soup.candidates=[0.6, 0.8]", "soup.corners='expert'")

    class Counted:
        """`evaluate`, with an exception before its fifth call, once."""

        def with_options(self, **_):
            async def evaluate(run):
                if len(evaluated) == 4:
                    evaluated.append("killed")
                    raise Killed
                evaluated.append(run.name.removeprefix("soup."))
                return await whole.with_options(persist_result=False)(run)

            return evaluate

    with job.prefect(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rheostat.flows.soup, "evaluate", Counted())
        with pytest.raises(Killed):
            run_flow(rheostat.flows.soup.soup(config))
        record = run_flow(rheostat.flows.soup.soup(config))
        done = len(evaluated)
        again = run_flow(rheostat.flows.soup.soup(config))
        assert len(evaluated) == done
    return Made(job, evaluated, record, again)


def test_a_killed_soup_continues_and_repeats_no_evaluation(soup):
    assert soup.again == soup.record
    assert soup.evaluated[:5] == [
        "statistics.start",
        *(f"at-{p}.bone-0.6-search" for p in ("0-1", "0.5-0.5", "1-0")),
        "killed",
    ]
    assert len(set(soup.evaluated)) == len(soup.evaluated) == 1 + 3 + 1 + 3 + 3


@pytest.mark.smoke
def test_a_soup_that_is_killed_while_it_trains_backbones_ends_with_the_same_weights(tmp_path, prefect_api):
    import rheostat.flows.soup

    job, store = Job(tmp_path, prefect_api, document=demo_job("soup").read_text()), tmp_path / "store"
    with InProcessJob(tmp_path, prefect_api).prefect():
        whole = run_flow(rheostat.flows.soup.soup(load_config(job.configured(), [*SMALLEST_SOUP, f"store='{store}'"])))
    store.rename(tmp_path / "whole")  # runs name the directories of the policies from which they start
    job.plant([Fault("driver", "after", "/soup.for-.*/manifests/it-0001/credit.json")])
    assert run_driver(job, "soup", *SMALLEST_SOUP) == -signal.SIGKILL
    assert not [*store.glob("soup.at-*/manifests/eval-*/summary.json")]
    assert run_driver(job, "soup", *SMALLEST_SOUP) == 0, (job.home / "output").read_text()
    (record,) = latest_records(str(store), "soup")
    assert record.model_copy(update={"when": whole.when}) == whole
    names = list_runs(str(store))
    assert names == list_runs(str(tmp_path / "whole")) and len(names) > 6
    for name in names:
        assert manifests_of(store / name) == manifests_of(tmp_path / "whole" / name)


def test_a_deleted_newest_record_of_a_soup_is_reported(soup, tmp_path):
    copytree(Path(soup.store) / "soups", tmp_path / "soups")
    assert main(["verify", "soup", "--store", str(tmp_path)]) == 0
    newest = max(tmp_path.glob("soups/soup/records/*.json"))
    newest.unlink()
    assert ["record 1 is missing" in problem for problem in verify_soup(str(tmp_path), "soup")] == [True]
    with pytest.raises(Damaged, match=f"Restore 'records/{newest.name}' from a copy of the store"):
        latest_records(str(tmp_path), "soup")


def test_only_the_candidate_with_the_largest_hypervolume_is_trained_to_the_end(soup):
    chosen, other = sorted(soup.record.candidates, key=lambda beta: -soup.record.candidates[beta])
    assert soup.record.beta == float(chosen) and {chosen, other} == {"0.6", "0.8"}
    mixes = ("0.6-0.4", "0.4-0.6", "0.8-0.2", "0.2-0.8", "1-0", "0-1")
    assert {name for name in list_runs(soup.store) if ".for-" in name} == {f"soup.for-{mix}" for mix in mixes}
    for beta, trained in ((chosen, True), (other, False)):
        run = open_run(soup.store, f"soup.for-{beta}-{1 - float(beta):.1f}")
        assert run.has(StageKey.policy(1)) and run.has(StageKey.policy(2)) == trained


def test_rewards_are_standardized_by_the_initial_policy_and_mixed_by_the_matrix(soup):
    record, statistics = soup.record, soup.record.statistics
    start = open_run(soup.store, "soup.statistics.start")
    tables = [
        read_shard(start.store, made.shards[0])
        for made in Batch.read(start, evaluation_key(0)).stage_manifests("scoring")
    ]
    for place, term in enumerate(record.terms):
        values = [value for table in tables for value in table[f"reward_{term}"].to_pylist()]
        assert len(values) == 4 * 8
        assert (statistics.mean[place], statistics.std[place]) == pytest.approx((np.mean(values), np.std(values)))
    for part, mix in zip(record.backbones, record.matrix, strict=True):
        run = open_run(soup.store, part.run)
        scores = read_shard(run.store, run.require(StageKey.parse("it-0001/scoring/0000")).shards[0])
        raw_NR = np.array([scores[f"reward_{term}"].to_pylist() for term in record.terms]).T
        mixed_N = ((raw_NR - np.array(statistics.mean)) / np.array(statistics.std)) @ np.array(mix)
        np.testing.assert_allclose(scores["reward"].to_pylist(), mixed_N, rtol=0, atol=1e-9)


def test_backbones_have_the_same_initial_policy_and_their_merge_is_evaluated(soup, tmp_path):
    record = soup.record
    starts = {
        open_run(soup.store, part.run).require(StageKey.policy(0)).bundles["weights"].digest
        for part in record.backbones
    }
    assert starts == {record.start.digest}
    made = soup_policy(soup.store, "soup", (0.5, 0.5), tmp_path / "middle")
    assert made.merge.soup["beta"] == record.beta
    assert [reward["name"] for reward in made.merge.soup["rewards"]] == ["thorough", "brief"]
    assert made.merge.soup["statistics"] == record.statistics.model_dump(mode="json")
    backbones = [load_file(Path(part.path) / WEIGHTS) for part in record.backbones]
    for name, tensor in load_file(tmp_path / "middle" / WEIGHTS).items():
        expected = sum(0.5 * each[name].double() for each in backbones)
        np.testing.assert_allclose(tensor.double(), expected, rtol=0, atol=1e-6)
    middle = open_run(soup.store, record.points[1].run)
    merged = fetch_bundle(middle.store, middle.require(StageKey.policy(0)).bundles["weights"])
    assert (merged / WEIGHTS).read_bytes() == (tmp_path / "middle" / WEIGHTS).read_bytes()


def test_a_corner_of_the_soup_is_the_policy_of_one_reward(soup, tmp_path):
    soup_policy(soup.store, "soup", (1, 0), tmp_path / "corner")
    expert = Path(soup.record.experts[0].path)
    assert (tmp_path / "corner" / WEIGHTS).read_bytes() == (expert / WEIGHTS).read_bytes()
    assert soup.record.experts[0].run == "soup.for-1-0" and soup.record.points[-1].run == "soup.at-1-0.expert"


def test_soup_front_reports_and_plots_the_front(soup, tmp_path, capsys):
    points = soup.record.points
    expected = measure_front([point.preference for point in points], [point.standardised for point in points], (-2, -2))
    assert soup.record.metrics == expected
    picture = tmp_path / "front.svg"
    assert main(["soup-front", "soup", "--to", str(picture), "--store", soup.store]) == 0
    shown = capsys.readouterr().out
    assert "<svg" in picture.read_text() and f"{expected.hypervolume:.3f}" in shown and "0.5, 0.5" in shown


def test_soup_front_compares_several_soups(soup, tmp_path, capsys):
    other = {**soup.record.model_dump(mode="json"), "name": "other", "number": 1, "fingerprint": "0" * 64}
    open_store(f"{soup.store}/soups/other").put("records/000001.json", seal(other))
    picture = tmp_path / "fronts.svg"
    assert main(["soup-front", "soup", "other", "--to", str(picture), "--store", soup.store]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["soup", "soup", "other"] and "hypervolume" in lines[0]
    assert lines[1].split()[1:] == lines[2].split()[1:]
    assert main(["soup-front", "--store", soup.store]) == 2
    assert "needs the name of at least one soup" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--preference", "0.5,0.6"], "sum to 1, but their sum is 1.1"),
        (["--preference", "1"], "one number for each of the 2 reward terms, but it has 1"),
        (
            ["--preference", "1,0", "--method", "oracle"],
            "--method must be bone, the methods with which it was trained, found oracle",
        ),
    ],
)
def test_invalid_preferences_are_refused(soup, tmp_path, capsys, words, said):
    target = tmp_path / "policy"
    assert main(["soup-policy", "soup", *words, "--to", str(target), "--store", soup.store]) == 2
    assert said in " ".join(capsys.readouterr().err.split()) and not target.exists()


def test_a_soup_of_the_same_name_with_another_configuration_is_refused(soup):
    import rheostat.flows.soup

    with soup.job.prefect(), pytest.raises(BadInput, match="was created with another configuration"):
        run_flow(rheostat.flows.soup.soup(tiny(soup.store, "warmup.steps=21")))


def test_other_methods_share_the_start_and_the_policies_for_one_reward(soup, tmp_path):
    import rheostat.flows.soup

    before = {name for name in list_runs(soup.store) if ".at-" not in name}
    with soup.job.prefect():
        rewarded = run_flow(rheostat.flows.soup.soup(tiny(soup.store, "soup.method='rewarded'")))
        assert {name for name in list_runs(soup.store) if ".at-" not in name} == before
        oracle = run_flow(rheostat.flows.soup.soup(tiny(soup.store, "soup.method='oracle'")))
    assert {name for name in list_runs(soup.store) if ".at-" not in name} == before | {"soup.for-0.5-0.5"}
    assert rewarded.backbones == soup.record.experts and oracle.start == rewarded.start == soup.record.start
    assert [point.weights for point in rewarded.points] == [point.preference for point in rewarded.points]
    # Each corner is one policy, whoever evaluates it: the same problems, the same seeds.
    for corner in (0, -1):
        rewards = {record.points[corner].rewards for record in (soup.record, rewarded, oracle)}
        assert len(rewards) == 1
    soup_policy(soup.store, "soup", (0.5, 0.5), tmp_path / "policy", method="oracle")
    own = Path(oracle.backbones[1].path) / WEIGHTS
    assert (tmp_path / "policy" / WEIGHTS).read_bytes() == own.read_bytes()
    with pytest.raises(BadInput, match="method 'oracle' has a policy only for the preferences of its grid"):
        soup_policy(soup.store, "soup", (0.3, 0.7), tmp_path / "other", method="oracle")
    with pytest.raises(
        BadInput,
        match="--method must be bone or rewarded or oracle, the methods with which it was trained, found no method",
    ):
        soup_policy(soup.store, "soup", (0.3, 0.7), tmp_path / "other")


def test_a_constant_reward_term_is_refused(tmp_path, prefect_api, capfd):
    job = InProcessJob(tmp_path, prefect_api)
    thorough = 'kind="target", name="thorough", target="list_length:near", options={items=14, factor=1}'
    rewards = f'scoring.rewards=[{{{thorough}}}, {{kind="regex", name="brief", pattern="^"}}]'
    demo, unset = demo_job("soup").read_text(), tmp_path / "soup.toml"
    assert demo.count("\nproblems = 64\n") == 1
    unset.write_text(demo.replace("\nproblems = 64\n", "\n"))
    with job.prefect():
        assert main(["soup", str(unset), *SMALL[:-1], *SMALL_SOUP, rewards, "--store", str(job.store)]) == 2
    assert "the scores of 'brief' are standardized, so they must differ" in capfd.readouterr().err
    evaluation = open_run(str(job.store), "soup.start").record.config["evaluation"]
    assert isinstance(evaluation, dict) and evaluation["problems"] == 64


def test_a_soup_of_three_rewards_has_three_backbones_and_a_lattice(tmp_path, prefect_api):
    import rheostat.flows.soup

    job = InProcessJob(tmp_path, prefect_api)
    terms = {"thorough": 14, "brief": 2, "middling": 8}
    rewards = [
        f'{{kind="target",name="{name}",target="list_length:near",options={{items={items},factor=1}}}}'
        for name, items in terms.items()
    ]
    changes = (
        f"scoring.rewards=[{','.join(rewards)}]",
        f"soup.terms={[*terms]}",
        "soup.beta=0.6",
        "soup.corners='merge'",
        "iterations=1",
    )
    with job.prefect():
        record = run_flow(rheostat.flows.soup.soup(tiny(str(job.store), *changes)))
    assert len(record.backbones) == 3 and len(record.points) == 6
    assert record.points[-1].preference == (1, 0, 0) and record.points[-1].weights == pytest.approx((2, -0.5, -0.5))
    soup_policy(str(job.store), "soup", (0.2, 0.2, 0.6), tmp_path / "policy")
    expert = Path(record.backbones[2].path)  # 0.6, 0.2, 0.2 is the mix of a backbone
    assert (tmp_path / "policy" / WEIGHTS).read_bytes() == (expert / WEIGHTS).read_bytes()
