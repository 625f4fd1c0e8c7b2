"""Rewards that see episodes: as messages, and turn by turn."""

from dataclasses import replace

import pytest

from infra.store.shards import read_shard
from infra.store.storage import open_store
from models.config.algorithms import Grpo
from models.config.engines import SamplingConfig
from models.config.environments import TargetEnvironment
from models.config.judges import ChoiceVerdict, EndpointJudge, JudgeReward
from models.config.reward_terms import EnvironmentReward, TargetReward
from models.config.rewards import ScoringConfig
from models.judges.prompts import escape
from models.records.work import JudgeWork, ScoringWork
from models.workers.judge import JudgeWorker
from models.workers.rollout import RolloutWorker
from models.workers.scoring import ScoringWorker
from tests.support.chat_server import chat_server, says
from tests.support.policies import small_tokenizer
from tests.support.rollout_workers import ENGINE, example

ENVIRONMENT = TargetEnvironment(
    target="tests.support.games:Echo",
    options={"reward": 1.0},
    prompts="text",
    parser="none",
    turn_tokens=12,
    processes=1,
)
SAMPLING = SamplingConfig(max_new_tokens=40, stop=("a", "e", "o", " ", "1", "0"))


@pytest.fixture
def scored(tmp_path):
    """Play a shard of twenty episodes, score it, and return pairs of rollouts and scores."""
    store = open_store(f"{tmp_path}/run")
    work = replace(example(store, tmp_path / "policy"), sampling=SAMPLING)

    def run(*rewards):
        worker = RolloutWorker(str(tmp_path), "run", ENGINE, 1, environment=ENVIRONMENT)
        [rollouts] = worker.generate(work).shards
        worker.close()
        scorer = ScoringWorker(str(tmp_path), "run", ScoringConfig(rewards=rewards), Grpo())
        found = scorer.score(ScoringWork(iteration=3, rollouts=rollouts, tokenizer=work.policy.weights))
        scorer.close()
        run.rollouts = rollouts
        tables = (read_shard(store, each).to_pylist() for each in (rollouts, found.shards[0]))
        return [*zip(*tables, strict=True)]

    return run


def test_a_reward_gets_the_prompt_the_turns_and_what_was_said_to_them_as_messages(scored):
    reward = TargetReward(target="tests.support.rewards:told", name="told")
    tokenizer, several = small_tokenizer(), 0
    for rollout, score in scored(reward):
        at, expected = 0, [("user", rollout["prompt"])]
        for turn in rollout["turns"]:
            written = rollout["completion_tokens"][at : at + turn["tokens"]]
            written = written[:-1] if written[-1] == tokenizer.eos_token_id else written
            expected.append(("assistant", tokenizer.decode(written)))
            at += turn["tokens"]
            said = rollout["completion_tokens"][at : at + turn["observation"]]
            expected += [("user", tokenizer.decode(said))] if said else []
            at += turn["observation"]
        assert [(each["role"], each["content"]) for each in rollout["messages"]] == expected
        assert score["reward_told"] == sum(
            (place + 1) * (len(role) + len(text)) for place, (role, text) in enumerate(expected)
        )
        several += len(expected) > 3
    assert several > 5


def test_a_reward_per_turn_has_the_spans_of_the_environments_and_the_turns_texts(scored):
    target = TargetReward(target="tests.support.rewards:turn_lengths", name="lengths", per="turn", aggregate="sum")
    for rollout, score in scored(target, EnvironmentReward(per="turn", gamma=0)):
        assert score["spans_lengths"] == score["spans_environment"]
        texts = [each["content"] for each in rollout["messages"] if each["role"] == "assistant"]
        assert score["values_lengths"] == [float(len(text)) for text in texts]
        assert len(texts) == len(rollout["turns"])
        assert score["reward_lengths"] == sum(map(len, texts))


def test_a_judge_reads_what_was_said_to_the_policy_in_tags_that_nobody_can_spell(scored, tmp_path):
    rows = [row for row, _ in scored(EnvironmentReward())]
    with chat_server(lambda *_: says("yes")) as server:
        model = EndpointJudge(base_url=server.url, allowed_hosts=("127.0.0.1",), allow_private=True, model="judge")
        reward = JudgeReward(model=model, verdict=ChoiceVerdict(constrained=False))
        worker = JudgeWorker(str(tmp_path), "run", "judge", reward, 1)
        worker.judge(JudgeWork(iteration=3, rollouts=scored.rollouts, model=None, seed=3))
    asked = {each.text.partition("Solution to examine:")[2] for each in server.asked}
    several = 0
    for row in rows:
        if not row["completion"].strip():
            continue  # a judge is not asked about nothing
        shown = [
            escape(each["content"].strip())
            if each["role"] == "assistant"
            else f"<environment>\n{escape(each['content'].strip())}\n</environment>"
            for each in row["messages"][1:]
        ]
        several += len(shown) > 1
        assert any("\n" + "\n".join(shown) + "\nfence-" in each for each in asked)
    assert several > 5
    assert all("What stands between <environment>" in each.text for each in server.asked)


def test_without_an_environment_messages_are_prompt_and_completion():
    from models.rewards.evaluate import Case, Evaluator

    evaluator = Evaluator(ScoringConfig(rewards=(TargetReward(target="tests.support.rewards:told"),)))
    try:
        [verdict] = evaluator.evaluate([Case("1+1?", "2", "2")])
    finally:
        evaluator.close()
    assert verdict.values == (len("user1+1?") + 2 * len("assistant2"),)
