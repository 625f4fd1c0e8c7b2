"""The input check: a question on stdin, an answer in one line, and nothing written."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from string import ascii_letters

import pytest

from infra.config import PoolsConfig
from infra.errors import BadInput
from models.commands.preflight import Inputs, check
from models.config.algorithms import CriticConfig, Grpo, Ppo
from models.config.data import (
    ArithmeticData,
    ArithmeticPreferences,
    FileData,
    FilePreferences,
    MixtureData,
    WeightedFile,
)
from models.config.engines import SamplingConfig, VllmEngine
from models.config.judges import (
    ChoiceVerdict,
    DirectoryJudge,
    DirectoryRewardModel,
    EndpointJudge,
    JudgeReward,
    ModelReward,
    PolicyShape,
    ScoreVerdict,
    ServedReward,
    TrainedJudge,
    TrainedRewardModel,
)
from models.config.lora import LoraConfig
from models.config.objectives import UpdateConfig
from models.config.optimizers import Adam8bit
from models.config.policy import DirectoryPolicy, ScratchPolicy
from models.config.reward_terms import MathReward, NumericReward, TargetReward
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.teachers import Distillation, TeacherDirectory, TeacherEndpoint
from models.config.training import DpoConfig, EvaluationConfig, WarmupConfig
from models.data.problems import load_problems
from models.modeling.policy import build_scratch, save_policy
from models.text.tokenizer import scratch_tokenizer
from tests.support.environments import leave_vllm
from tests.support.pictures import picture
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


WIDE = ScratchPolicy(heads=1, kv_heads=1, context=128)


def served_by(engine: VllmEngine, policy: ScratchPolicy = WIDE, *, gpus: float = 0) -> dict[str, float]:
    return check(inputs(policy=policy, rollout=RolloutConfig(engine=engine), gpus=gpus))


def test_a_vllm_servers_cache_is_as_large_as_it_is_told_to_be(vllm):
    facts = served_by(VllmEngine(cache_gib=0.25, dtype="bfloat16"))
    assert facts["rollout_weights_bytes"] == 2 * facts["parameters"]
    assert facts["rollout_cache_bytes"] == 2**28
    assert served_by(VllmEngine())["rollout_cache_bytes"] == 2**30
    on_gpus = VllmEngine(python=leave_vllm("cuda"))
    assert "rollout_cache_bytes" not in served_by(on_gpus, gpus=1), "it takes what the GPU has left"
    elsewhere = served_by(VllmEngine(base_urls=("http://127.0.0.1:8000",)))
    assert elsewhere["rollout_weights_bytes"] == elsewhere["rollout_cache_bytes"] == 0


def test_heads_that_vllm_cannot_serve_on_a_cpu_are_refused(vllm):
    odd = WIDE.model_copy(update={"heads": 4, "kv_heads": 4})
    with pytest.raises(BadInput, match=r"on a CPU: the model's heads have 8 numbers, expected one of 32, 64, 80"):
        served_by(VllmEngine(), odd)
    assert served_by(VllmEngine(python=leave_vllm("cuda")), odd, gpus=1)
    assert served_by(VllmEngine(base_urls=("http://127.0.0.1:8000",)), odd)


def test_a_server_holds_the_longest_sequence(vllm):
    with pytest.raises(BadInput, match=r"max_model_len 64: the longest prompt and completion have \d+ tokens together"):
        served_by(VllmEngine(max_model_len=64))
    with pytest.raises(BadInput, match=r"max_model_len 256: the model's context is 128 tokens"):
        served_by(VllmEngine(max_model_len=256))
    # Keys and values of 32 numbers in each of 2 layers, 4 bytes each, for 128 tokens.
    assert 2 * 2 * 32 * 4 * 128 == 2**16
    assert served_by(VllmEngine(cache_gib=2**16 / 2**30))["rollout_cache_bytes"] == 2**16
    with pytest.raises(BadInput, match=r"cache_gib .*: one sequence of 128 tokens takes 6.1e-05 GiB; raise it"):
        served_by(VllmEngine(cache_gib=2**15 / 2**30))


def judged_by(engine: VllmEngine, shape: ScratchPolicy) -> dict[str, float]:
    judge = JUDGE.model_copy(update={"model": TrainedJudge(shape=shape, engine=engine)})
    return check(inputs(scoring=ScoringConfig(rewards=(judge,))))


def test_a_judge_on_vllm_fits_it_as_a_policy_does(vllm):
    wide = ScratchPolicy(heads=1, kv_heads=1)
    assert judged_by(VllmEngine(), wide)["honest_parameters"] > 0
    with pytest.raises(BadInput, match=r"reward honest: model.engine.kind 'vllm' on a CPU: the model's heads have 8"):
        judged_by(VllmEngine(), ScratchPolicy())
    with pytest.raises(BadInput, match=r"reward honest: model.engine.max_model_len 8: the longest prompt and"):
        judged_by(VllmEngine(max_model_len=8), wide)


def test_a_run_on_vllm_is_refused_where_its_environment_is_not(engines):
    with pytest.raises(BadInput, match=r"rollout.engine.kind 'vllm': .* found none: `rheostat engine install vllm`"):
        served_by(VllmEngine())
    assert served_by(VllmEngine(base_urls=("http://127.0.0.1:8000",)))
    with pytest.raises(BadInput, match=r"reward 'honest': model.engine.kind 'vllm': expected an environment with vllm"):
        judged_by(VllmEngine(), WIDE)
    elsewhere = inputs(policy=WIDE, rollout=RolloutConfig(engine=VllmEngine())).model_copy(
        update={"pools": PoolsConfig(ray_address="10.0.0.1:6379")}
    )
    assert check(elsewhere), "the workers of a cluster look for it where they are"


def test_an_environment_that_does_not_import_vllm_is_refused(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    with pytest.raises(BadInput, match=r"bare/bin/python: expected a Python that imports vllm: ModuleNotFoundError"):
        served_by(VllmEngine(python=bare / "bin" / "python"))
    with pytest.raises(BadInput, match=r"engine.python .*/nowhere': expected the Python of an environment with vllm"):
        served_by(VllmEngine(python=tmp_path / "nowhere"))


def test_workers_with_gpus_and_an_environment_without_do_not_go_together(vllm):
    with pytest.raises(BadInput, match=r"is for cpu, workers with GPUs need one for cuda; set pools.gpus_per_worker=0"):
        served_by(VllmEngine(), gpus=1)
    with pytest.raises(BadInput, match=r"is for cuda, workers without GPUs need one for cpu; `rheostat engine install"):
        served_by(VllmEngine(python=leave_vllm("cuda")))


def test_zero_stages_divide_what_they_shard_among_the_ranks():
    numbers = check(inputs())["parameters"]
    for stage, held in [(0, (4, 4, 8)), (1, (4, 4, 3)), (2, (4, 1, 3)), (3, (1, 1, 3))]:
        facts = check(inputs(update=UpdateConfig(zero_stage=stage), ranks=4))
        found = [facts[f"update_{kind}_bytes"] / numbers for kind in ("weights", "gradient", "optimizer")]
        assert found == pytest.approx(held, rel=1e-3)  # from 1 on, DeepSpeed steps a float32 copy of its own: 12 over 4


def test_layers_are_computed_again_from_a_size_on_unless_it_is_said_otherwise():
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


def test_a_prompt_without_room_is_found_in_the_heldout_split_too(tmp_path):
    (tmp_path / "h.jsonl").write_text(json.dumps({"prompt": "?" * 99, "answer": "1"}))
    data = rows(tmp_path / "t.jsonl", *("1",) * 80).model_copy(update={"heldout_path": tmp_path / "h.jsonl"})
    with pytest.raises(BadInput, match=r"h.jsonl:1: the prompt has 99 tokens, expected 1 to 64"):
        check(inputs(data=data, policy=ScratchPolicy(vocab_size=300, context=128)))


def test_a_reference_without_a_number_is_found_before_a_completion_exists(tmp_path):
    data = rows(tmp_path / "a.jsonl", *("#### 1",) * 80, "#### many")
    with pytest.raises(BadInput, match=r"a.jsonl:81: the numeric reward finds no number in the reference '#### many'"):
        check(inputs(data=data, rollout=RolloutConfig(prompts=8), scoring=ScoringConfig(rewards=(NumericReward(),))))


def test_what_is_too_long_does_not_count_where_it_is_left_out(tmp_path):
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


def test_a_file_that_its_weight_asks_for_more_problems_than_it_has_is_refused(tmp_path):
    few, many = (rows(tmp_path / f"{name}.jsonl", *("1",) * count) for name, count in (("few", 4), ("many", 60)))
    few.path.write_text(few.path.read_text().replace("question", "another question"))
    kept = tmp_path / "h.jsonl"
    kept.write_text(json.dumps({"prompt": "held out", "answer": "1"}))
    weights = {few.path: 1, many.path: 4}
    sources = tuple(WeightedFile(path=path, heldout_path=kept, weight=weight) for path, weight in weights.items())
    data = MixtureData(sources=sources)
    facts = check(inputs(data=data, rollout=RolloutConfig(prompts=20)))
    assert (facts["train_problems"], facts["heldout_problems"], facts["most_prompts"]) == (64, 2, 20)
    with pytest.raises(BadInput, match=r"\[0\]: its weight asks for 4.2 of rollout.prompts 21, it has 4 .* 20 prompts"):
        check(inputs(data=data, rollout=RolloutConfig(prompts=21)))


def test_all_references_that_a_reward_cannot_read_are_told_together(tmp_path):
    data = rows(tmp_path / "a.jsonl", *("#### 1",) * 80, "#### many", "#### few", "#### many")
    with pytest.raises(BadInput, match=r"the numeric reward finds no number .*; ") as refused:
        check(inputs(data=data, rollout=RolloutConfig(prompts=8), scoring=ScoringConfig(rewards=(NumericReward(),))))
    assert all(f"a.jsonl:{line}" in str(refused.value) for line in (81, 82, 83))


def test_a_reference_without_mathematics_is_found_before_a_completion_exists(tmp_path):
    data = rows(tmp_path / "a.jsonl", *(r"\$18.90",) * 80, "-$5")
    scoring = ScoringConfig(rewards=(MathReward(),))
    with pytest.raises(BadInput, match=r"a.jsonl:81: the math reward finds no mathematics in the reference '-\$5'"):
        check(inputs(data=data, rollout=RolloutConfig(prompts=8), scoring=scoring))


def test_a_heldout_problem_that_is_trained_on_is_refused(tmp_path):
    data = rows(tmp_path / "a.jsonl", *("1",) * 80)
    with pytest.raises(BadInput, match=r"a.jsonl:1: this held-out problem is a training problem too"):
        check(inputs(data=data.model_copy(update={"heldout_path": data.path})))


def test_an_iteration_larger_than_the_data_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"rollout.prompts 64 exceeds the \d training problems"):
        check(inputs(data=rows(tmp_path / "a.jsonl", *("1",) * 10)))


def test_an_evaluation_larger_than_the_held_out_split_is_refused(tmp_path):
    few = rows(tmp_path / "a.jsonl", *("1",) * 100)
    question = inputs(data=few).model_copy(update={"evaluation": EvaluationConfig(problems=64)})
    with pytest.raises(
        BadInput, match=r"evaluation.problems 64 exceeds the \d\d held-out problems: set evaluation.prob"
    ):
        check(question)


def test_completions_as_long_as_the_context_are_refused():
    sampling = SamplingConfig(max_new_tokens=256)
    with pytest.raises(BadInput, match=r"max_new_tokens 256 leaves no room for a prompt: .* context is 256 tokens"):
        check(inputs(rollout=RolloutConfig(sampling=sampling)))


def test_a_loss_for_routers_is_refused_where_layers_are_dense_and_taken_where_they_have_experts(tmp_path):
    update = UpdateConfig(router_loss=1e-2)
    with pytest.raises(BadInput, match=r"update.router_loss: expected a policy with experts and a router for them"):
        check(inputs(update=update))
    write_policy(tmp_path, "mixtral")
    eight = update.model_copy(update={"optimizer": Adam8bit()})
    found = [
        check(inputs(policy=DirectoryPolicy(path=tmp_path), update=each))["update_optimizer_bytes"]
        for each in (update, eight)
    ]
    assert found[1] < 0.26 * found[0]


def test_warm_up_without_answers_is_refused(tmp_path):
    data = rows(tmp_path / "a.jsonl", *("1",) * 100).model_copy(update={"answer_column": None})
    with pytest.raises(BadInput, match=r"set data.answer_column, or remove \[warmup\]"):
        check(inputs(data=data, warmup=WarmupConfig()))


def test_a_directory_that_is_no_policy_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"no config.json: not a model directory"):
        check(inputs(policy=DirectoryPolicy(path=tmp_path)))


def test_every_problem_of_the_gsm8k_that_ships_is_checked():
    data = FileData(path=GSM8K / "train.jsonl", heldout_path=GSM8K / "heldout.jsonl", prompt_column="question")
    facts = check(inputs(data=data, policy=ScratchPolicy(vocab_size=2048, context=768)))
    assert (facts["train_problems"], facts["heldout_problems"]) == (192, 64)


JUDGE = JudgeReward(name="honest", model=TrainedJudge(), template="{answer} {completion}\n")
REMOTE = EndpointJudge(base_url="https://judge.example.com/v1", allowed_hosts=("judge.example.com",), model="large")


def served(reward: ServedReward) -> Inputs:
    return inputs(
        rollout=RolloutConfig(prompts=8, sampling=SamplingConfig(max_new_tokens=32)),
        scoring=ScoringConfig(rewards=(NumericReward(), reward)),
    )


def test_the_size_of_a_judge_is_known_before_the_run():
    assert check(served(JUDGE))["honest_parameters"] > 10_000
    facts = check(served(JUDGE.model_copy(update={"model": TrainedJudge(shape=PolicyShape())})))
    assert facts["honest_parameters"] == facts["parameters"]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (JUDGE.model_copy(update={"template": "{answer}"}), r"reward honest: its template .* has no \{completion\}"),
        (
            JUDGE.model_copy(update={"verdict": ScoreVerdict(pattern="(")}),
            r"reward honest: its pattern '\(' is not a regular expression",
        ),
        (
            JUDGE.model_copy(update={"verdict": ScoreVerdict(pattern="[0-9]")}),
            r"reward honest: its pattern .* expected a group around the score, found none",
        ),
        (
            JUDGE.model_copy(update={"verdict": ChoiceVerdict(choices={"yes": 1, " ": 0})}),
            r"reward honest: its verdicts .* expected a text for each, found an empty one",
        ),
        (
            JUDGE.model_copy(update={"verdict": ChoiceVerdict(choices={"yes": 1, "Yes ": 0})}),
            r"reward honest: its verdicts .* expected different texts",
        ),
        (
            JUDGE.model_copy(update={"verdict": ScoreVerdict()}),
            r"reward honest: a trained judge answers with one of several texts: .* found score",
        ),
        (
            JUDGE.model_copy(update={"model": TrainedJudge(shape=ScratchPolicy(context=16))}),
            r"reward honest: questions about right answers have up to \d+ tokens and a verdict up to 1, .* 16 together",
        ),
        (
            JUDGE.model_copy(
                update={"model": TrainedJudge(shape=PolicyShape()), "verdict": ChoiceVerdict(constrained=False)}
            ),
            r"reward honest: questions about right answers have .* a verdict up to 512, expected at most 256 together",
        ),
        (
            JUDGE.model_copy(update={"model": DirectoryJudge(path=Path("nowhere"))}),
            r"reward honest: policy nowhere: no such directory",
        ),
        (
            ModelReward(name="liked", model=DirectoryRewardModel(path=Path("nowhere"))),
            r"reward liked: reward model nowhere: no such directory",
        ),
        (
            JUDGE.model_copy(update={"model": REMOTE}),
            r"reward honest: judge at .* a constrained choice needs an engine that constrains",
        ),
        (
            JUDGE.model_copy(
                update={"model": REMOTE.model_copy(update={"guided": "vllm", "allowed_hosts": ("b.org",)})}
            ),
            r"reward honest: endpoint .* is not in allowed_hosts",
        ),
        (
            JUDGE.model_copy(
                update={"model": REMOTE.model_copy(update={"guided": "vllm", "api_key_variable": "NO_SUCH_KEY"})}
            ),
            r"reward honest: api_key_variable: expected a key in the environment variable 'NO_SUCH_KEY'",
        ),
    ],
)
def test_what_cannot_serve_a_reward_is_one_line_before_the_run(reward, message):
    with pytest.raises(BadInput, match=message) as caught:
        check(served(reward))
    assert "\n" not in str(caught.value)


def test_a_teacher_is_counted_whole_on_every_update_rank(tmp_path):
    teacher = Distillation(teacher=TeacherDirectory(path=publish_teacher(tmp_path, operations=4)))
    facts = check(inputs(algorithm=Grpo(distillation=teacher), update=UpdateConfig(zero_stage=3), ranks=4))
    assert facts["teacher_parameters"] == facts["parameters"]
    assert facts["update_teacher_bytes"] == 4 * facts["parameters"]


def test_a_teacher_of_another_tokenizer_is_one_line_before_the_run(tmp_path):
    teacher = Distillation(teacher=TeacherDirectory(path=publish_teacher(tmp_path, operations=1)))
    with pytest.raises(
        BadInput, match=r"algorithm\.distillation\.teacher .*its tokenizer is not the policy's"
    ) as caught:
        check(inputs(algorithm=Grpo(distillation=teacher)))
    assert "\n" not in str(caught.value)


def test_a_teacher_behind_an_endpoint_is_checked_and_holds_no_memory(monkeypatch):
    teacher = TeacherEndpoint(base_url="https://teacher.example.com/v1", allowed_hosts=("b.org",), model="large")
    with pytest.raises(BadInput, match="not in allowed_hosts"):
        check(inputs(algorithm=Grpo(distillation=Distillation(teacher=teacher))))
    known = teacher.model_copy(update={"allowed_hosts": ("teacher.example.com",)})
    assert "teacher_parameters" not in check(inputs(algorithm=Grpo(distillation=Distillation(teacher=known))))


def test_a_critic_is_counted_as_the_policy_is():
    facts = check(inputs(algorithm=Ppo()))
    assert facts["critic_parameters"] == facts["parameters"] + ScratchPolicy().hidden_size
    assert facts["update_critic_bytes"] == 16 * facts["critic_parameters"]


def test_a_critic_that_is_no_classifier_is_one_line_before_the_run(tmp_path):
    policy = publish_teacher(tmp_path, operations=4)
    with pytest.raises(BadInput, match=r"algorithm\.critic: .*expected a sequence classifier") as caught:
        check(inputs(algorithm=Ppo(critic=CriticConfig(path=policy))))
    assert "\n" not in str(caught.value)


def trained_reward(template: str | None) -> ScoringConfig:
    return ScoringConfig(rewards=(ModelReward(name="liked", model=TrainedRewardModel(), template=template),))


def test_preferences_are_counted_and_a_trained_reward_model_is_as_large_as_the_policy():
    pairs = ArithmeticPreferences(train_pairs=40, heldout_pairs=10)
    facts = check(inputs(preferences=pairs, dpo=DpoConfig(), scoring=trained_reward("{prompt}{completion}")))
    assert (facts["train_pairs"], facts["heldout_pairs"]) == (40, 10)
    assert facts["liked_parameters"] == facts["parameters"]


def test_a_template_under_which_all_pairs_are_alike_is_refused():
    with pytest.raises(BadInput, match=r"has no \{completion\}: all would score alike"):
        check(inputs(preferences=ArithmeticPreferences(train_pairs=40), scoring=trained_reward("{prompt}")))


def test_pairs_that_do_not_fit_the_policy_are_refused_before_the_run(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no" * (300 if n == 7 else 1)} for n in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BadInput, match=r"pairs\.jsonl:8: prompt and rejected completion have \d+ tokens"):
        check(inputs(preferences=FilePreferences(path=path, heldout_fraction=0.3), dpo=DpoConfig()))


def test_pairs_about_held_out_problems_are_refused(tmp_path):
    [problem, *_] = load_problems(ArithmeticData(train_problems=64, heldout_problems=8), "heldout", 0)
    path, kept = tmp_path / "pairs.jsonl", tmp_path / "kept.jsonl"
    path.write_text(json.dumps({"prompt": problem.prompt, "chosen": "yes", "rejected": "no"}) + "\n")
    kept.write_text(json.dumps({"prompt": "other", "chosen": "yes", "rejected": "no"}) + "\n")
    with pytest.raises(BadInput, match=r"pairs\.jsonl:1: this pair to learn from is about a held-out problem"):
        check(inputs(preferences=FilePreferences(path=path, heldout_path=kept), dpo=DpoConfig()))


def publish_teacher(path: Path, *, operations: int) -> Path:
    """A policy as a run on such problems would make it."""
    problems = load_problems(ArithmeticData(train_problems=64, heldout_problems=8, operations=operations), "train", 0)
    tokenizer = scratch_tokenizer(ScratchPolicy(), problems)
    save_policy(build_scratch(ScratchPolicy(), tokenizer, seed=1), tokenizer, path)
    return path


def test_adapters_need_gradients_and_optimizer_state_for_themselves_alone():
    policy = ScratchPolicy(hidden_size=16, intermediate_size=16, layers=2, heads=2, kv_heads=1)
    facts = check(inputs(policy=policy, update=UpdateConfig(lora=LoraConfig(rank=4))))
    # Per block: q and o are 16 x 16, k and v 8 x 16, the three MLP matrices 16 x 16.
    assert facts["trained_parameters"] == 2 * 4 * (5 * 32 + 2 * 24)
    assert facts["update_weights_bytes"] == 4 * (facts["parameters"] + facts["trained_parameters"])
    assert facts["update_gradient_bytes"] == 4 * facts["trained_parameters"]
    assert facts["update_optimizer_bytes"] == 8 * facts["trained_parameters"]


def test_a_target_that_no_layer_has_is_bad_input_with_the_nearest_name():
    with pytest.raises(BadInput, match=r"lora.targets 'q_prj': .*down_proj, gate_proj.*did you mean 'q_proj'"):
        check(inputs(update=UpdateConfig(lora=LoraConfig(targets=("q_prj",)))))


def test_images_are_read_to_their_end_and_refused_for_a_policy_that_reads_text_alone(tmp_path):
    whole = picture(size=(300, 300), kind="JPEG")
    (tmp_path / "red.jpg").write_bytes(whole)
    lines = [json.dumps({"prompt": f"question {n}", "answer": "1", "images": ["red.jpg"]}) for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    asked = inputs(
        data=FileData(path=tmp_path / "a.jsonl", heldout_fraction=0.2, images_column="images"),
        rollout=RolloutConfig(prompts=4),
    )
    with pytest.raises(
        BadInput, match=r"a.jsonl:\d+: expected a prompt without images, found 1: the policy reads text"
    ):
        check(asked)
    (tmp_path / "red.jpg").write_bytes(whole[:-400])
    with pytest.raises(BadInput, match=r"a.jsonl:\d+: image 1: not decodable: image file is truncated"):
        check(asked)
