"""A small judge is initialized, trained by an update rank, and queried for verdicts."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.judges import DirectoryJudge, EndpointJudge, JudgeReward, ServedReward, TrainedJudge
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.config.verdicts import LogprobVerdict
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import JudgeWarmupWork, JudgeWork, PolicyWork, RewardModelPreparation
from rheostat.models.workers.judge import JudgeWorker
from rheostat.models.workers.preparation import PreparationWorker
from rheostat.models.workers.update import UpdateWorker
from tests.support.demos import ArithmeticData
from tests.support.judged import rollouts

DATA = ArithmeticData(operations=1, train_problems=400, heldout_problems=16)
SHAPE = ScratchPolicy(architecture="qwen3", hidden_size=64, intermediate_size=96, context=64)
WARMUP = SupervisedWarmup(steps=150, batch_size=32, learning_rate=3e-3)
REWARD = JudgeReward(
    name="honest",
    model=TrainedJudge(shape=SHAPE, warmup=WARMUP),
    template="{answer}\n{completion}\n",
    verdict=LogprobVerdict(),
)


def prepare_judge(home: Path, reward: ServedReward = REWARD) -> Outcome:
    work = RewardModelPreparation(reward=reward, data=DATA, seed=0)
    return PreparationWorker(str(home), "run", 1).make_reward_model(work)


def train_judge(home: Path, judge: ModelVersion, warmup: SupervisedWarmup = WARMUP) -> Outcome:
    worker = UpdateWorker(str(home), "run", update=UpdateConfig(), algorithm=Grpo(), temperature=1.0, threads=1)
    worker.join(0, 1, "127.0.0.1", 0)
    return worker.warm_judge(JudgeWarmupWork(judge=judge, reward=REWARD, data=DATA, warmup=warmup, seed=0))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("training")


@pytest.fixture(scope="module")
def untrained(home: Path) -> ModelVersion:
    return prepare_judge(home).model


@pytest.fixture(scope="module")
def training(home: Path, untrained: ModelVersion) -> Outcome:
    return train_judge(home, untrained)


def test_the_same_preparation_gives_the_same_judge(untrained, tmp_path):
    assert prepare_judge(tmp_path).model == untrained


def test_the_vocabulary_of_a_judge_has_tokens_for_its_questions_and_verdicts(home, untrained):
    tokenizer = AutoTokenizer.from_pretrained(fetch_bundle(open_store(f"{home}/run"), untrained.weights))
    assert len(tokenizer("#### 16\n#### 16\n")["input_ids"]) <= 6


@pytest.mark.thorough
def test_training_a_judge_lowers_its_loss_and_publishes_the_weights(training):
    assert training.model.version == 0
    assert training.model.state is None
    assert training.metrics["steps"] == 150
    assert training.metrics["loss_last"] < 0.6 * training.metrics["loss_first"]


def test_training_a_judge_twice_gives_identical_weights(home, untrained):
    once, again = (train_judge(home, untrained, WARMUP.model_copy(update={"steps": 10})).model for _ in range(2))
    assert untrained.weights != once.weights == again.weights
    assert once == again


def test_a_trained_judge_prefers_an_answer_to_no_answer(training, home):
    shard = rollouts(home, "#### 1", "2+3=")
    outcome = JudgeWorker(str(home), "run", "honest", REWARD, 1).judge(
        JudgeWork(iteration=0, rollouts=shard, model=training.model, seed=0)
    )
    answer, no_answer = read_shard(open_store(f"{home}/run"), outcome.shards[0])["value"].to_pylist()
    assert answer > no_answer


def test_a_judge_from_a_directory_is_a_copy_of_the_directory(home, tmp_path):
    policy = PreparationWorker(str(tmp_path), "run", 1).make_policy(PolicyWork(policy=SHAPE, data=DATA, seed=0)).model
    directory = fetch_bundle(open_store(f"{tmp_path}/run"), policy.weights)
    reward = REWARD.model_copy(update={"model": DirectoryJudge(path=directory)})
    assert prepare_judge(home, reward).model.weights.digest == policy.weights.digest


def test_a_judge_behind_an_endpoint_cannot_be_prepared(home):
    remote = EndpointJudge(base_url="https://judge.example.com/v1", allowed_hosts=("judge.example.com",), model="large")
    with pytest.raises(BadInput, match="endpoint"):
        prepare_judge(home, REWARD.model_copy(update={"model": remote}))
