"""Rewards of episodes: of the messages, and of single turns."""

import pytest

from rheostat.infra.store.shards import read_shard
from rheostat.models.config.judges import EndpointJudge, JudgeReward
from rheostat.models.config.reward_terms import EnvironmentReward, TargetReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.verdicts import ChoiceVerdict
from rheostat.models.judges.chats import escape
from rheostat.models.records.work import JudgeWork, ScoringWork
from rheostat.models.rewards.evaluate import Case, Evaluator
from rheostat.models.workers.judge import JudgeWorker
from tests.support.chat_server import chat_server, reply_with
from tests.support.episodes import Episodes, decode_turns, target_environment

Pairs = list[tuple[dict[str, object], dict[str, object]]]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> Episodes:
    episodes = Episodes(tmp_path_factory.mktemp("episodes"))
    [episodes.rollouts] = episodes.play(target_environment(options={"reward": 1.0}, processes=1)).shards
    return episodes


@pytest.fixture
def score(episodes, make_worker):
    """Function that scores the episodes with these rewards and returns pairs of rollouts and scores."""

    def score_episodes(*rewards: object) -> Pairs:
        work = ScoringWork(iteration=3, rollouts=episodes.rollouts, tokenizer=episodes.work.policy.weights)
        [scores] = make_worker(*rewards, home=episodes.home).score(work).shards
        return [
            *zip(*(read_shard(episodes.store, each).to_pylist() for each in (episodes.rollouts, scores)), strict=True)
        ]

    return score_episodes


def test_a_reward_gets_the_prompt_the_turns_and_the_answers_as_messages(score):
    num_longer = 0
    for rollout, scores in score(TargetReward(target="tests.support.rewards:told", name="told")):
        expected = [("user", rollout["prompt"])]
        for turn, answer in decode_turns(rollout):
            expected += [("assistant", turn), *([("user", answer)] if answer else [])]
        assert [(each["role"], each["content"]) for each in rollout["messages"]] == expected
        assert scores["reward_told"] == sum(
            (place + 1) * (len(role) + len(text)) for place, (role, text) in enumerate(expected)
        )
        num_longer += len(expected) > 3
    assert num_longer > 5


def test_a_reward_per_turn_has_the_spans_and_texts_of_the_turns(score):
    reward = TargetReward(target="tests.support.rewards:turn_lengths", name="lengths", per="turn", aggregate="sum")
    for rollout, scores in score(reward, EnvironmentReward(per="turn", gamma=0)):
        assert scores["spans_lengths"] == scores["spans_environment"]
        texts = [each["content"] for each in rollout["messages"] if each["role"] == "assistant"]
        assert scores["values_lengths"] == [float(len(text)) for text in texts]
        assert len(texts) == len(rollout["turns"])
        assert scores["reward_lengths"] == sum(map(len, texts))


def test_a_judge_reads_the_answers_of_the_environment_in_tags_that_a_policy_cannot_imitate(episodes):
    with chat_server(lambda *_: reply_with("yes")) as server:
        model = EndpointJudge(base_url=server.url, allowed_hosts=("127.0.0.1",), allow_private=True, model="judge")
        reward = JudgeReward(model=model, verdict=ChoiceVerdict(constrained=False))
        worker = JudgeWorker(str(episodes.home), "run", "judge", reward, 1)
        worker.judge(JudgeWork(iteration=3, rollouts=episodes.rollouts, model=None, seed=3))
    questions = {each.text.partition("Solution to examine:")[2] for each in server.asked}
    num_longer = 0
    for row in episodes.read_rows(episodes.rollouts):
        if not row["completion"].strip():
            continue  # no judge is queried about an empty completion
        parts = [
            escape(each["content"].strip())
            if each["role"] == "assistant"
            else f"<environment>\n{escape(each['content'].strip())}\n</environment>"
            for each in row["messages"][1:]
        ]
        num_longer += len(parts) > 1
        assert any("\n" + "\n".join(parts) + "\nfence-" in each for each in questions)
    assert num_longer > 5
    assert all("What stands between <environment>" in each.text for each in server.asked)


def test_without_an_environment_messages_are_prompt_and_completion():
    evaluator = Evaluator(ScoringConfig(rewards=(TargetReward(target="tests.support.rewards:told"),)))
    try:
        [verdict] = evaluator.evaluate([Case("1+1?", "2", "2")])
    finally:
        evaluator.close()
    assert verdict.values == (len("user1+1?") + 2 * len("assistant2"),)
