"""Facts that the check before a run reports about a job; the refusals are in tests/unit/refusals/models.toml."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from string import ascii_letters

import pytest

from infra.config import PoolsConfig
from infra.errors import BadInput
from models.commands.preflight import check
from models.config.algorithms import Grpo, Ppo
from models.config.data import (
    ArithmeticData,
    ArithmeticPreferences,
    FileData,
    MixtureData,
    WeightedFile,
)
from models.config.engines import SamplingConfig, VllmEngine
from models.config.judges import (
    JudgeReward,
    ModelReward,
    PolicyShape,
    TrainedJudge,
    TrainedRewardModel,
)
from models.config.lora import LoraConfig
from models.config.objectives import UpdateConfig
from models.config.optimizers import Adam8bit
from models.config.policy import DirectoryPolicy, ScratchPolicy
from models.config.reward_terms import NumericReward, TargetReward
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.teachers import Distillation, TeacherDirectory, TeacherEndpoint
from models.config.training import DpoConfig, WarmupConfig
from models.data.problems import load_problems
from models.modeling.policy import build_scratch, save_policy
from models.text.tokenizer import scratch_tokenizer
from tests.support.environments import leave_vllm
from tests.support.policies import write_policy
from tests.support.preflight import inputs

GSM8K = Path(__file__).parents[3] / "configs" / "data" / "gsm8k"


def ask(question: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as the flows do, where it could leave something behind."""
    return subprocess.run(
        [sys.executable, "-m", "models.commands.preflight"], input=question, capture_output=True, text=True, cwd=folder
    )


def rows(path: Path, *answers: str) -> FileData:
    lines = [json.dumps({"prompt": f"question {n}", "answer": answer}) for n, answer in enumerate(answers)]
    path.write_text("\n".join(lines))
    return FileData(path=path, heldout_fraction=0.2)


def test_the_command_answers_in_one_line_and_writes_nothing(tmp_path):
    question = inputs().model_dump(mode="json") | {"name": "a part that the check has no use for"}
    answer = ask(json.dumps(question), tmp_path)
    assert answer.returncode == 0, answer.stderr
    [line] = answer.stdout.splitlines()
    verdict = json.loads(line)
    assert (verdict["ok"], verdict["error"]) == (True, "")
    assert (verdict["facts"]["train_problems"], verdict["facts"]["heldout_problems"]) == (64, 8)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_one_line_and_exit_code_2_and_what_a_reward_prints_stays_out_of_it(tmp_path):
    (tmp_path / "chatty.py").write_text("print('hello')")
    scoring = ScoringConfig(rewards=(TargetReward(target="chatty:reward"),))
    answer = ask(inputs(scoring=scoring).model_dump_json(), tmp_path)
    assert answer.returncode == 2, answer.stderr
    verdict = json.loads(answer.stdout)
    assert (verdict["ok"], verdict["facts"]) == (False, {})
    assert "no attribute 'reward'" in verdict["error"]


def test_memory_estimates_follow_from_the_shape():
    policy = ScratchPolicy(hidden_size=16, intermediate_size=16, layers=2, heads=2, kv_heads=1)
    facts = check(inputs(policy=policy, rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=30))))
    # Embeddings, two blocks of (q, k, v, o, three MLP matrices, two norms), the last norm.
    assert facts["parameters"] == 354 * 16 + 2 * (256 + 128 + 128 + 256 + 3 * 256 + 32) + 16
    assert facts["rollout_weights_bytes"] == facts["update_weights_bytes"] == 4 * facts["parameters"]
    assert facts["update_optimizer_bytes"] == 8 * facts["parameters"]
    # Keys and values of 8 numbers in each of 2 layers.
    assert facts["rollout_cache_bytes"] == 2 * 2 * 8 * 4 * 512 * (facts["longest_prompt_tokens"] + 30)


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Where environments of engines lie; there is none."""
    monkeypatch.setenv("RHEOSTAT_ENGINES", str(tmp_path / "engines"))
    return tmp_path / "engines"


@pytest.fixture
def vllm(engines):
    """The Python of an environment that an install left."""
    return leave_vllm()


JUDGE = JudgeReward(name="honest", model=TrainedJudge(), template="{answer} {completion}\n")
WIDE = ScratchPolicy(heads=1, kv_heads=1, context=128)


def served_by(engine: VllmEngine, policy: ScratchPolicy = WIDE, *, gpus: float = 0) -> dict[str, float]:
    return check(inputs(policy=policy, rollout=RolloutConfig(engine=engine), gpus=gpus))


def test_the_cache_of_a_vllm_server_has_the_configured_size(vllm):
    facts = served_by(VllmEngine(cache_gib=0.25, dtype="bfloat16"))
    assert facts["rollout_weights_bytes"] == 2 * facts["parameters"]
    assert facts["rollout_cache_bytes"] == 2**28
    assert served_by(VllmEngine())["rollout_cache_bytes"] == 2**30
    on_gpus = VllmEngine(python=leave_vllm("cuda"))
    assert "rollout_cache_bytes" not in served_by(on_gpus, gpus=1), "it takes what the GPU has left"
    elsewhere = served_by(VllmEngine(base_urls=("http://127.0.0.1:8000",)))
    assert elsewhere["rollout_weights_bytes"] == elsewhere["rollout_cache_bytes"] == 0


@pytest.mark.parametrize(
    ("engine", "policy", "more"),
    [
        ({"python": "cuda"}, WIDE.model_copy(update={"heads": 4, "kv_heads": 4}), {"gpus": 1}),
        ({"base_urls": ("http://127.0.0.1:8000",)}, WIDE.model_copy(update={"heads": 4, "kv_heads": 4}), {}),
        (
            {"cache_gib": 2 * 2 * 32 * 4 * 128 / 2**30},
            WIDE,
            {},
        ),  # keys and values of 32 numbers in 2 layers, 4 bytes each
    ],
    ids=["heads for GPUs", "heads for a server elsewhere", "a cache of exactly one sequence"],
)
def test_a_vllm_server_with_room_for_the_policy_is_accepted(vllm, engine, policy, more):
    if "python" in engine:
        engine = {"python": leave_vllm("cuda")}
    assert served_by(VllmEngine(**engine), policy, **more)


def test_an_environment_is_not_looked_for_on_this_machine_if_workers_are_on_others(engines):
    job = inputs(policy=WIDE, rollout=RolloutConfig(engine=VllmEngine()))
    assert check(job.model_copy(update={"pools": PoolsConfig(ray_address="10.0.0.1:6379")}))
    assert served_by(VllmEngine(base_urls=("http://127.0.0.1:8000",)))


def test_a_judge_on_vllm_is_counted(vllm):
    judge = JUDGE.model_copy(
        update={"model": TrainedJudge(shape=ScratchPolicy(heads=1, kv_heads=1), engine=VllmEngine())}
    )
    assert check(inputs(scoring=ScoringConfig(rewards=(judge,))))["honest_parameters"] > 0


def test_zero_stages_divide_what_they_shard_among_the_ranks():
    numbers = check(inputs())["parameters"]
    for stage, held in [(0, (4, 4, 8)), (1, (4, 4, 3)), (2, (4, 1, 3)), (3, (1, 1, 3))]:
        facts = check(inputs(update=UpdateConfig(zero_stage=stage), ranks=4))
        found = [facts[f"update_{kind}_bytes"] / numbers for kind in ("weights", "gradient", "optimizer")]
        assert found == pytest.approx(held, rel=1e-3)  # from 1 on, DeepSpeed steps a float32 copy of its own: 12 over 4


def test_layers_are_recomputed_from_a_certain_size_on_unless_configured_otherwise():
    small, large = ScratchPolicy(), ScratchPolicy(hidden_size=512, intermediate_size=1536, layers=16, context=1024)
    rollout = RolloutConfig(prompts=32, group_size=64, sampling=SamplingConfig(max_new_tokens=200))

    def found(policy, asked=None):
        config = UpdateConfig(activation_checkpointing=asked, minibatches=1)
        return check(inputs(policy=policy, rollout=rollout, update=config))

    assert (found(small)["recomputes"], found(large)["recomputes"]) == (0, 1)
    assert (found(small, asked=True)["recomputes"], found(large, asked=False)["recomputes"]) == (1, 0)
    kept, again = found(large, asked=False), found(large)
    assert kept["update_activations_bytes"] == again["kept_activations_bytes"] > 2**30
    # One block of 16 whole, of the others a token's state of 512 numbers.
    assert again["update_activations_bytes"] == kept["update_activations_bytes"] / 16 + 16384 * 4 * 512 * 16


def test_prompts_that_are_dropped_as_too_long_are_not_counted(tmp_path):
    random = Random(0)
    for name in ("t", "h"):
        texts = ["".join(random.choices(ascii_letters, k=99 if n % 4 == 0 else 9)) for n in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": t, "answer": "1"}) for t in texts))
    data = FileData(path=tmp_path / "t.jsonl", heldout_path=tmp_path / "h.jsonl", too_long="drop")
    small = ScratchPolicy(vocab_size=300, context=128)
    facts = check(inputs(data=data, policy=small, rollout=RolloutConfig(prompts=9)))
    assert (facts["train_problems"], facts["heldout_problems"], facts["too_long"]) == (9, 9, 6)
    with pytest.raises(BadInput, match=r"rollout.prompts 10 exceeds the 9 training problems"):
        check(inputs(data=data, policy=small, rollout=RolloutConfig(prompts=10)))
    refusing = data.model_copy(update={"too_long": "refuse"})
    with pytest.raises(BadInput, match=r"t.jsonl:1: the prompt has \d+ tokens, .*; .*t.jsonl:5: .*; .*t.jsonl:9: "):
        check(inputs(data=refusing, policy=small, rollout=RolloutConfig(prompts=9)))


def test_a_mixture_is_as_large_as_its_files_and_an_iteration_as_its_weights_allow(tmp_path):
    few, many = (rows(tmp_path / f"{name}.jsonl", *("1",) * count) for name, count in (("few", 4), ("many", 60)))
    few.path.write_text(few.path.read_text().replace("question", "another question"))
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps({"prompt": "held out", "answer": "1"}))
    weights = {few.path: 1, many.path: 4}
    sources = tuple(WeightedFile(path=path, heldout_path=heldout, weight=weight) for path, weight in weights.items())
    facts = check(inputs(data=MixtureData(sources=sources), rollout=RolloutConfig(prompts=20)))
    assert (facts["train_problems"], facts["heldout_problems"], facts["most_prompts"]) == (64, 2, 20)


def test_an_optimizer_in_8_bits_holds_a_quarter_of_the_state_of_a_policy_with_experts(tmp_path):
    write_policy(tmp_path, "mixtral")
    update = UpdateConfig(router_loss=1e-2)
    usual, small = (
        check(inputs(policy=DirectoryPolicy(path=tmp_path), update=each))["update_optimizer_bytes"]
        for each in (update, update.model_copy(update={"optimizer": Adam8bit()}))
    )
    assert small < 0.26 * usual


def test_warm_up_without_answers_is_refused(tmp_path):
    data = rows(tmp_path / "a.jsonl", *("1",) * 100).model_copy(update={"answer_column": None})
    with pytest.raises(BadInput, match=r"set data.answer_column, or remove \[warmup\]"):
        check(inputs(data=data, warmup=WarmupConfig()))


def test_every_problem_of_the_gsm8k_that_ships_is_checked():
    data = FileData(path=GSM8K / "train.jsonl", heldout_path=GSM8K / "heldout.jsonl", prompt_column="question")
    facts = check(inputs(data=data, policy=ScratchPolicy(vocab_size=2048, context=768)))
    assert (facts["train_problems"], facts["heldout_problems"]) == (192, 64)


@pytest.mark.parametrize("shape", [None, PolicyShape()], ids=["a shape of its own", "the shape of the policy"])
def test_the_size_of_a_judge_is_known_before_the_run(shape):
    judge = JUDGE if shape is None else JUDGE.model_copy(update={"model": TrainedJudge(shape=shape)})
    rollout = RolloutConfig(prompts=8, sampling=SamplingConfig(max_new_tokens=32))
    facts = check(inputs(rollout=rollout, scoring=ScoringConfig(rewards=(NumericReward(), judge))))
    assert facts["honest_parameters"] > 10_000
    assert shape is None or facts["honest_parameters"] == facts["parameters"]


def test_a_teacher_is_counted_whole_on_every_update_rank_unless_it_is_behind_an_endpoint(tmp_path):
    problems = load_problems(ArithmeticData(train_problems=64, heldout_problems=8, operations=4), "train", 0)
    tokenizer = scratch_tokenizer(ScratchPolicy(), problems)
    save_policy(build_scratch(ScratchPolicy(), tokenizer, seed=1), tokenizer, tmp_path)
    teacher = Grpo(distillation=Distillation(teacher=TeacherDirectory(path=tmp_path)))
    facts = check(inputs(algorithm=teacher, update=UpdateConfig(zero_stage=3), ranks=4))
    assert facts["teacher_parameters"] == facts["parameters"]
    assert facts["update_teacher_bytes"] == 4 * facts["parameters"]
    elsewhere = TeacherEndpoint(base_url="https://t.example.com/v1", allowed_hosts=("t.example.com",), model="large")
    assert "teacher_parameters" not in check(inputs(algorithm=Grpo(distillation=Distillation(teacher=elsewhere))))


def test_a_critic_is_counted_as_the_policy_is():
    facts = check(inputs(algorithm=Ppo()))
    assert facts["critic_parameters"] == facts["parameters"] + ScratchPolicy().hidden_size
    assert facts["update_critic_bytes"] == 16 * facts["critic_parameters"]


def test_preferences_are_counted_and_a_trained_reward_model_is_as_large_as_the_policy():
    pairs = ArithmeticPreferences(train_pairs=40, heldout_pairs=10)
    liked = ModelReward(name="liked", model=TrainedRewardModel(), template="{prompt}{completion}")
    facts = check(inputs(preferences=pairs, dpo=DpoConfig(), scoring=ScoringConfig(rewards=(liked,))))
    assert (facts["train_pairs"], facts["heldout_pairs"]) == (40, 10)
    assert facts["liked_parameters"] == facts["parameters"]


def test_adapters_need_gradients_and_optimizer_state_for_themselves_alone():
    policy = ScratchPolicy(hidden_size=16, intermediate_size=16, layers=2, heads=2, kv_heads=1)
    facts = check(inputs(policy=policy, update=UpdateConfig(lora=LoraConfig(rank=4))))
    # Per block: q and o are 16 x 16, k and v 8 x 16, the three MLP matrices 16 x 16.
    assert facts["trained_parameters"] == 2 * 4 * (5 * 32 + 2 * 24)
    assert facts["update_weights_bytes"] == 4 * (facts["parameters"] + facts["trained_parameters"])
    assert facts["update_gradient_bytes"] == 4 * facts["trained_parameters"]
    assert facts["update_optimizer_bytes"] == 8 * facts["trained_parameters"]
