"""Facts that the input check reports about a job. Refusals are in tests/unit/refusals/models.toml."""

import asyncio
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random
from string import ascii_letters

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.commands.preflight import check
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.text.tokenizer import scratch_tokenizer
from rheostat.tasks.config.run import load_config
from rheostat.tasks.run.preflight import preflight, report_checks
from tests.support.demos import ArithmeticData
from tests.support.policies import write_policy
from tests.support.preflight import check_job, read_inputs

GSM8K = Path(__file__).parents[3] / "configs" / "data" / "gsm8k"


@pytest.fixture(autouse=True)
def place(make_job) -> Path:
    """Job on arithmetic problems in the current directory."""
    return make_job("arithmetic")


def ask_command(question: str) -> subprocess.CompletedProcess[str]:
    """Run the input check as the flows do, in a directory where leftover files would be noticed."""
    command = [sys.executable, "-m", "rheostat.models.commands.preflight"]
    return subprocess.run(command, input=question, capture_output=True, text=True)


def write_rows(name: str, *answers: str, question: str = "question") -> None:
    lines = [json.dumps({"prompt": f"{question} {n}", "answer": answer}) for n, answer in enumerate(answers)]
    Path(name).write_text("\n".join(lines))


@pytest.mark.smoke
@pytest.mark.system
def test_the_input_check_prints_the_parts_and_one_line_and_writes_nothing(place):
    before = sorted(place.rglob("*"))
    answer = ask_command(json.dumps(read_inputs().model_dump(mode="json") | {"name": "a key that the check ignores"}))
    assert answer.returncode == 0, answer.stderr
    *progress, line = answer.stdout.splitlines()
    assert {"checking": "data"} in map(json.loads, progress)
    verdict = json.loads(line)
    assert (verdict["ok"], verdict["error"]) == (True, "")
    assert (verdict["facts"]["train_problems"], verdict["facts"]["heldout_problems"]) == (64, 8)
    assert sorted(place.rglob("*")) == before


@pytest.mark.system
def test_the_names_of_the_parts_are_reported_while_they_are_checked(place):
    parts: list[str] = []
    with report_checks(parts.append):
        result = asyncio.run(preflight(load_config(Path("job.toml")), part="plan"))
    assert parts.index("scoring") < parts.index("policy") and {"data", "algorithm", "rollout.engine"} <= {*parts}
    assert result.facts == check_job()


@pytest.mark.system
@pytest.mark.parametrize(("options", "is_shown"), [([], True), (["--json"], False)])
def test_the_plan_names_the_part_that_is_checked_on_a_terminal_but_not_with_json(place, options, is_shown):
    terminal, error_stream = pty.openpty()
    command = [sys.executable, "-m", "rheostat", "plan", "job.toml", *options]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error_stream, env=environment) as planning:
        os.close(error_stream)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while chunk := os.read(terminal, 4096):
                shown += chunk
        output, _ = planning.communicate(timeout=60)
    os.close(terminal)
    assert planning.returncode == 0
    assert (b"checking the inputs: data" in shown) == is_shown
    assert b"checking" not in output


@pytest.mark.smoke
@pytest.mark.system
def test_bad_input_gives_exit_code_2_and_one_line_without_the_output_of_rewards(place):
    (place / "chatty.py").write_text("print('hello')")
    reward = "scoring.rewards=[{kind='target',target='chatty:reward'}]"
    answer = ask_command(read_inputs(reward).model_dump_json())
    assert answer.returncode == 2, answer.stderr
    verdict = json.loads(answer.stdout.splitlines()[-1])
    assert (verdict["ok"], verdict["facts"]) == (False, {})
    assert "no attribute 'reward'" in verdict["error"]


SMALL = ("policy.hidden_size=16", "policy.intermediate_size=16", "policy.layers=2", "policy.heads=2")


def test_memory_estimates_follow_from_the_model_shape():
    facts = check_job(*SMALL, "policy.kv_heads=1", "rollout.sampling.max_new_tokens=30")
    # Embeddings, two blocks of (q, k, v, o, three MLP matrices, two norms), the last norm.
    assert facts["parameters"] == 354 * 16 + 2 * (256 + 128 + 128 + 256 + 3 * 256 + 32) + 16
    assert facts["rollout_weights_bytes"] == facts["update_weights_bytes"] == 4 * facts["parameters"]
    assert facts["update_optimizer_bytes"] == 8 * facts["parameters"]
    # Keys and values of 8 numbers in each of 2 layers.
    assert facts["rollout_cache_bytes"] == 2 * 2 * 8 * 4 * 512 * (facts["longest_prompt_tokens"] + 30)


def test_only_the_adapters_need_gradients_and_optimizer_state_if_there_are_adapters():
    facts = check_job(*SMALL, "policy.kv_heads=1", "update.lora.rank=4")
    # Per block: q and o are 16 x 16, k and v 8 x 16, the three MLP matrices 16 x 16.
    assert facts["trained_parameters"] == 2 * 4 * (5 * 32 + 2 * 24)
    assert facts["update_weights_bytes"] == 4 * (facts["parameters"] + facts["trained_parameters"])
    assert facts["update_gradient_bytes"] == 4 * facts["trained_parameters"]
    assert facts["update_optimizer_bytes"] == 8 * facts["trained_parameters"]


FOR_GPUS = "rollout.engine.python=engines/vllm-0.32.0-cuda/bin/python"
ELSEWHERE = "rollout.engine.base_urls=['http://127.0.0.1:8000']"


def test_the_cache_of_a_vllm_server_has_the_configured_size(make_job):
    make_job("vllm")
    facts = check_job("rollout.engine.cache_gib=0.25", "rollout.engine.dtype=bfloat16")
    assert facts["rollout_weights_bytes"] == 2 * facts["parameters"]
    assert facts["rollout_cache_bytes"] == 2**28
    assert check_job()["rollout_cache_bytes"] == 2**30
    on_gpus = check_job(FOR_GPUS, "pools.gpus_per_worker=1")
    assert "rollout_cache_bytes" not in on_gpus, "it takes the rest of the GPU's memory"
    elsewhere = check_job(ELSEWHERE)
    assert elsewhere["rollout_weights_bytes"] == elsewhere["rollout_cache_bytes"] == 0


@pytest.mark.parametrize(
    "overrides",
    [
        ("policy.heads=4", "policy.kv_heads=4", FOR_GPUS, "pools.gpus_per_worker=1"),
        ("policy.heads=4", "policy.kv_heads=4", ELSEWHERE),
        # One sequence exactly: keys and values of 32 numbers in 2 layers, 4 bytes each, for 128 tokens.
        (f"rollout.engine.cache_gib={2 * 2 * 32 * 4 * 128 / 2**30:f}1",),
    ],
)
def test_a_vllm_server_with_room_for_the_policy_is_accepted(make_job, overrides):
    make_job("vllm")
    assert check_job(*overrides)


@pytest.mark.parametrize("override", ["pools.ray_address=10.0.0.1:6379", ELSEWHERE])
def test_vllm_need_not_be_installed_if_workers_or_servers_are_on_other_machines(make_job, monkeypatch, override):
    make_job("vllm")
    monkeypatch.setenv("RHEOSTAT_ENGINES", "none")
    assert check_job(override)


def test_zero_stages_divide_what_they_shard_among_the_ranks():
    numbers = check_job()["parameters"]
    for stage, held in [(0, (4, 4, 8)), (1, (4, 4, 3)), (2, (4, 1, 3)), (3, (1, 1, 3))]:
        facts = check_job(f"update.zero_stage={stage}", "pools.update_ranks=4")
        found = [facts[f"update_{kind}_bytes"] / numbers for kind in ("weights", "gradient", "optimizer")]
        assert found == pytest.approx(held, rel=1e-3)  # from 1 on, DeepSpeed steps a float32 copy of its own: 12 over 4


def test_layers_are_recomputed_above_a_certain_size_unless_configured_otherwise():
    large = ("policy.hidden_size=512", "policy.intermediate_size=1536", "policy.layers=16", "policy.context=1024")
    rollout = ("rollout.prompts=32", "rollout.group_size=64", "rollout.sampling.max_new_tokens=200")

    def check_update(*overrides: str, recomputes: str = "") -> dict[str, float]:
        return check_job(*rollout, *overrides, "update.minibatches=1", f"update.activation_checkpointing={recomputes}")

    kept, again = check_update(*large, recomputes="false"), check_update(*large)
    assert (check_update()["recomputes"], again["recomputes"]) == (0, 1)
    assert (check_update(recomputes="true")["recomputes"], kept["recomputes"]) == (1, 0)
    assert kept["update_activations_bytes"] == again["kept_activations_bytes"] > 2**30
    # One block of 16 whole, of the others a token's state of 512 numbers.
    assert again["update_activations_bytes"] == kept["update_activations_bytes"] / 16 + 16384 * 4 * 512 * 16


def test_prompts_that_are_dropped_as_too_long_are_not_counted():
    random = Random(0)
    for name in ("t", "h"):
        texts = ["".join(random.choices(ascii_letters, k=99 if n % 4 == 0 else 9)) for n in range(12)]
        Path(f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": t, "answer": "1"}) for t in texts))
    data = "data={{kind='file',path='t.jsonl',heldout_path='h.jsonl',on_too_long='{}'}}"
    small = ("policy.vocab_size=300", "policy.context=128")
    facts = check_job(data.format("drop"), *small, "rollout.prompts=9")
    assert (facts["train_problems"], facts["heldout_problems"], facts["too_long"]) == (9, 9, 6)
    with pytest.raises(BadInput, match=r"rollout.prompts is 10, .* 9 training problems"):
        check_job(data.format("drop"), *small, "rollout.prompts=10")
    with pytest.raises(BadInput, match=r"t.jsonl:1: .*t.jsonl:5: .*t.jsonl:9: "):
        check_job(data.format("refuse"), *small, "rollout.prompts=9")


def test_rows_of_data_and_preferences_that_are_dropped_are_counted_by_reason():
    rows = [{"prompt": f"Problem {n}?", "answer": str(n)} for n in range(4)]
    pairs = [{"prompt": f"Pair {n}?", "chosen": "a", "rejected": "b"} for n in range(4)]
    bad = [{"rejected": "a"}, {"chosen": ""}, {"chosen": "c" * 200}]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"prompt": " ", "answer": "1"}])))
    Path("h.jsonl").write_text(json.dumps({"prompt": "Held out?", "answer": "1"}))
    Path("p.jsonl").write_text("\n".join(map(json.dumps, [*pairs, *(pairs[0] | each for each in bad)])))
    Path("q.jsonl").write_text(json.dumps({"chosen": "Held out pair? a", "rejected": "Held out pair? b"}))
    inputs = read_inputs(
        "data={kind='file',path='t.jsonl',heldout_path='h.jsonl',drop=['empty']}",
        "preferences={kind='file',path='p.jsonl',heldout_path='q.jsonl',drop=['ties','empty','too_long']}",
        *("dpo.steps=1", "policy.vocab_size=300", "policy.context=128", "rollout.prompts=2"),
    )
    result = check(inputs)
    facts, notes = result.facts, result.notes
    assert (facts["train_problems"], facts["dropped/empty"]) == (4, 1)
    assert (facts["train_pairs"], facts["heldout_pairs"]) == (4, 1)
    assert [facts[f"dropped_pairs/{reason}"] for reason in ("ties", "empty", "too_long")] == [1, 1, 1]
    [note] = [note for note in notes if "recognized" in note]
    assert "q.jsonl: recognized as pairs of texts that begin with the prompt in columns chosen and rejected." in note


def test_the_weights_of_a_mixture_limit_the_number_of_prompts_of_an_iteration():
    write_rows("few.jsonl", *("1",) * 4, question="another question")
    write_rows("many.jsonl", *("1",) * 60)
    write_rows("heldout.jsonl", "1", question="held out")
    few, many = (
        f"path='{name}.jsonl',heldout_path='heldout.jsonl',weight={n}" for name, n in (("few", 1), ("many", 4))
    )
    facts = check_job(f"data={{kind='mixture',sources=[{{{few}}},{{{many}}}]}}", "rollout.prompts=20")
    assert (facts["train_problems"], facts["heldout_problems"], facts["max_prompts"]) == (64, 2, 20)


def test_an_8_bit_optimizer_has_a_quarter_of_the_state_of_a_policy_with_experts(place):
    write_policy(place / "mixtral", "mixtral")
    job = ("policy.kind=directory", "policy.path=mixtral", "update.router_loss=0.01")
    usual, small = (
        check_job(*job, f"update.optimizer.kind={kind}")["update_optimizer_bytes"] for kind in ("adamw", "adam8bit")
    )
    assert small < 0.26 * usual
    assert check_job(*job, "update.router_replay=rollout")


def test_warm_up_without_answers_is_refused():
    write_rows("a.jsonl", *("1",) * 100)
    job = read_inputs("data={kind='file',path='a.jsonl',heldout_fraction=0.2}", "warmup.steps=1")
    with pytest.raises(BadInput, match=r"data.answer_column.* \[warmup\]"):
        check(job.model_copy(update={"data": job.data.model_copy(update={"answer_column": None})}))


def test_every_problem_of_the_bundled_gsm8k_is_checked():
    files = f"path='{GSM8K}/train.jsonl',heldout_path='{GSM8K}/heldout.jsonl'"
    facts = check_job(
        f"data={{kind='file',{files},prompt_column='question'}}", "policy.vocab_size=2048", "policy.context=768"
    )
    assert (facts["train_problems"], facts["heldout_problems"]) == (192, 64)


@pytest.mark.parametrize(
    ("folder", "model", "parameters"),
    [
        ("arithmetic", "{kind='trained'}", None),
        ("arithmetic", "{kind='trained',shape={kind='policy'}}", "parameters"),
        ("vllm", "{kind='trained',shape={kind='scratch',heads=1,kv_heads=1},engine={kind='vllm'}}", None),
    ],
)
def test_the_input_check_estimates_the_size_of_a_judge(make_job, folder, model, parameters):
    make_job(folder)
    judge = f"{{kind='judge',name='honest',model={model},template='{{answer}} {{completion}}'}}"
    job = (f"scoring.rewards=[{{kind='numeric'}},{judge}]", "rollout.engine.kind=transformers")
    facts = check_job(*job, "rollout.prompts=8", "rollout.sampling.max_new_tokens=32")
    assert facts["honest_parameters"] > 10_000
    assert parameters is None or facts["honest_parameters"] == facts[parameters]


def test_a_teacher_counts_on_every_update_rank_unless_it_is_behind_an_endpoint(place):
    problems = load_problems(ArithmeticData(train_problems=64, heldout_problems=8, operations=4), "train", 0)
    tokenizer = scratch_tokenizer(ScratchPolicy(), problems)
    save_policy(build_scratch(ScratchPolicy(), tokenizer, seed=1), tokenizer, place / "teacher")
    job = ("pools.update_ranks=4", "algorithm.kind=grpo")
    for stage, ranks in ((2, 1), (3, 4)):  # only ZeRO-3 shards weights
        shards = (f"update.zero_stage={stage}", "algorithm.distillation.teacher={kind='directory',path='teacher'}")
        facts = check_job(*job, *shards)
        assert facts["teacher_parameters"] == facts["parameters"]
        assert facts["update_teacher_bytes"] == 4 * facts["parameters"] // ranks
    endpoint = "{kind='endpoint',base_url='https://t.com',allowed_hosts=['t.com'],model='large'}"
    assert "teacher_parameters" not in check_job(*job, f"algorithm.distillation.teacher={endpoint}")


def test_a_critic_needs_as_much_memory_as_the_policy():
    facts = check_job("algorithm.kind=ppo")
    assert facts["critic_parameters"] == facts["parameters"] + ScratchPolicy().hidden_size
    sizes = {part: facts[f"update_critic_{part}_bytes"] for part in ("weights", "gradient", "optimizer")}
    assert sizes == {part: size * facts["critic_parameters"] for part, size in zip(sizes, (4, 4, 8), strict=True)}


def test_preferences_are_counted_and_a_trained_reward_model_is_as_large_as_the_policy():
    reward = "{kind='model',name='liked',model={kind='trained'},template='{prompt}{completion}'}"
    pairs = "preferences={kind='answers',train_pairs=40,heldout_pairs=10}"
    facts = check_job(pairs, "dpo={}", f"scoring.rewards=[{reward}]")
    assert (facts["train_pairs"], facts["heldout_pairs"]) == (40, 10)
    assert facts["liked_parameters"] == facts["parameters"]
