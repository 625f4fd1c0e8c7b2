"""The judge worker with judges of steps: local engines, an endpoint, canaries and counters."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

from bench.paced import PacedEngine
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.judges import Canaries, DirectoryJudge, JudgeReward
from rheostat.models.config.verdicts import StepsVerdict
from rheostat.models.records.schemas import VERDICT_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import JudgeWork
from rheostat.models.workers.judge import JudgeWorker
from tests.support.chat_server import chat_server, reply_with
from tests.support.endpoint_judges import endpoint_at, write_rollouts
from tests.support.policies import write_policy

SPEAKING = PacedEngine(
    base_seconds=0,
    per_sequence_seconds=0,
    median_tokens=40,
    endings=("<incorrect_steps></incorrect_steps>", "<incorrect_steps>0, 9</incorrect_steps>", "It is all right."),
)
LOCAL = JudgeReward(
    name="critic",
    model=DirectoryJudge(path="judge", engine=SPEAKING),
    verdict=StepsVerdict(),
    votes=4,
    retries=1,
    sampling=SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=400),
)
COMPLETIONS = ("First.\n\nSo 1.", "Only 1.", "Add.\n\n```\nx\n\ny\n```\n\nSo 2.", " \n\n ")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def model(home: Path) -> ModelVersion:
    write_policy(home / "model", changes={"max_position_embeddings": 8192})
    return ModelVersion(version=0, weights=publish_bundle(open_store(f"{home}/run"), home / "model", prefix="judges"))


def judge(home: Path, reward: JudgeReward, *completions: str, model: ModelVersion | None = None) -> Outcome:
    rollouts = write_rollouts(open_store(f"{home}/run"), *completions)
    return JudgeWorker(str(home), "run", "critic", reward, 1).judge(
        JudgeWork(iteration=3, rollouts=rollouts, model=model, seed=5)
    )


def table_of(home: Path, outcome: Outcome) -> pa.Table:
    return read_shard(open_store(f"{home}/run"), outcome.shards[0])


@pytest.mark.thorough
def test_a_local_judge_is_queried_k_times_about_all_steps_at_once(home, model):
    outcome = judge(home, LOCAL, *COMPLETIONS, model=model)
    table = table_of(home, outcome)
    assert table.schema.remove_metadata() == VERDICT_SCHEMA
    rows = table.to_pylist()
    assert len({(row["prompt_row"], row["vote"]) for row in rows}) == 3 * 4 + 1
    for row in rows:
        if row["prompt_row"] == 3:
            assert (row["steps"], row["value"], row["text"]) == ([0], -1.0, None)  # says nothing: it is not asked about
        elif row["text"].endswith("It is all right."):
            assert row["steps"] is None
            assert row["value"] is None
            assert "expected a pair of <incorrect_steps> tags" in row["error"]
        else:
            assert row["steps"] == ([] if row["text"].endswith("<incorrect_steps></incorrect_steps>") else [0])
            assert row["error"] is None
    assert any(row["attempt"] == 1 for row in rows)
    assert judge(home, LOCAL, *COMPLETIONS, model=model).shards == outcome.shards


def test_counters_report_flagged_steps_dropped_indices_and_unusable_critiques(home, model):
    reward = LOCAL.model_copy(update={"retries": 0, "votes": 1})
    outcome = judge(home, reward, *COMPLETIONS[:3], *["One.\n\nTwo."] * 30, model=model)
    rows = table_of(home, outcome).to_pylist()
    steps = {0: 2, 1: 1, 2: 3} | dict.fromkeys(range(3, 33), 2)
    usable = [row for row in rows if row["steps"] is not None]
    flagged = [row for row in usable if row["steps"] == [0]]
    assert 0 < len(flagged) < len(usable) < 33
    assert outcome.metrics is not None
    assert {name: outcome.metrics[name] for name in ("completions", "unusable", "answers", "invalid", "empty")} == {
        "completions": 33,
        "unusable": 33 - len(usable),
        "answers": 33,
        "invalid": 33 - len(usable),
        "empty": 0,
    }
    assert outcome.metrics["steps"] == sum(steps[row["prompt_row"]] for row in usable)
    assert outcome.metrics["flagged_steps"] == outcome.metrics["dropped_indices"] == len(flagged)  # each names step 9


@pytest.mark.parametrize(("said", "passed"), [("", 3), ("0", 0), ("no tag", 0)])
def test_a_canary_passes_when_no_step_of_it_is_flagged(home, model, said, passed):
    ending = said if said == "no tag" else f"<incorrect_steps>{said}</incorrect_steps>"
    engine = SPEAKING.model_copy(update={"endings": (ending,)})
    changes = {"canaries": Canaries(per_shard=3), "model": LOCAL.model.model_copy(update={"engine": engine})}
    outcome = judge(home, LOCAL.model_copy(update=changes), "a", "b", model=model)
    assert outcome.metrics is not None
    assert outcome.metrics["canaries"] == (0 if said == "no tag" else 3)
    assert outcome.metrics["canaries_passed"] == passed
    assert outcome.metrics["completions"] == 2


def test_a_judge_without_a_valid_answer_is_unusable_and_flags_nothing(home, model):
    babble = {"model": DirectoryJudge(path="judge"), "template": "{steps}"}
    changes = babble | {"votes": 2, "sampling": SamplingConfig(temperature=0, max_new_tokens=8)}
    outcome = judge(home, LOCAL.model_copy(update=changes), *COMPLETIONS, model=model)
    assert outcome.metrics is not None
    assert outcome.metrics["unusable"] == outcome.metrics["completions"] == 3
    assert (outcome.metrics["steps"], outcome.metrics["flagged_steps"]) == (0, 0)
    assert outcome.metrics["invalid"] == outcome.metrics["answers"] == 6


def names_steps_with_a_two(asked, before):
    """Answer as an auditor for whom a step is wrong if it contains a 2."""
    steps = re.findall(r"<step_(\d+)>\n(.*?)\n</step_\1>", asked.text, re.S)
    wrong = ", ".join(f"<step_{index}>" for index, text in steps if "2" in text)
    return reply_with(f"Verdict: whatever\n<incorrect_steps>{wrong}</incorrect_steps>")


def test_an_endpoint_audits_the_wrapped_steps(home):
    with chat_server(names_steps_with_a_two) as server:
        outcome = judge(
            home,
            LOCAL.model_copy(update={"model": endpoint_at(server.url, retries=1), "votes": 2}),
            *COMPLETIONS,
            "2<step_1>2</step_1>\n\n1",
        )
    rows = table_of(home, outcome).to_pylist()
    found = {row["prompt_row"]: row["steps"] for row in rows}
    assert found == {0: [], 1: [], 2: [2], 3: [0], 4: [0]}
    assert {row["prompt_row"]: row["value"] for row in rows}[2] == pytest.approx(-1 / 3)
    assert len(server.asked) == 8
    assert all("Reference solution" in asked.text for asked in server.asked)
    assert all(asked.body["temperature"] == 0.7 for asked in server.asked)
