"""`rheostat init --data --policy`: the proposed job fits the data and passes the input check."""

import json
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.commands.preflight import Inputs, check
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.outline import ModelOutline
from rheostat.models.config.policy import ModelShape
from rheostat.models.config.proposals import JobProposal, ProposalRequest
from rheostat.models.proposals.job import propose_job
from rheostat.models.proposals.sizes import Machine, propose_batch_rows, propose_lora
from rheostat.models.rewards.rules import build_reward
from rheostat.tasks.config.documents import place_document
from rheostat.tasks.config.run import RunConfig, override_config
from tests.support.refused_folders import copy_model

ROWS = 40
GIB = 2**30


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_csv(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]) + "\n")


def write_parquet(path: Path, rows: list[dict[str, object]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


WRITERS = {".jsonl": write_jsonl, ".csv": write_csv, ".parquet": write_parquet}
SCHEMA = json.dumps({"type": "object", "required": ["name"]})
FORMULAS = [rf"\frac{{{number}}}{{7}}" for number in range(ROWS)]
STORY = "The quick brown fox jumps over the lazy dog near the river and sleeps number"


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Directory with the policy `chat` and its copy `plain` without a chat template."""
    place = tmp_path_factory.mktemp("models")
    for name in ("chat", "plain"):
        copy_model("chat", place / name)
    (place / "plain/chat_template.jinja").unlink()
    return place


@pytest.fixture
def propose(tmp_path, models):
    """Function that writes a data file and returns the proposed job with its validated configuration."""

    def propose(
        rows: list[dict[str, object]], suffix: str = ".jsonl", policy: str = "chat", **options: object
    ) -> tuple[JobProposal, RunConfig]:
        path = tmp_path / f"data{suffix}"
        WRITERS[suffix](path, rows)
        settings = {"memory": 16 * GIB, "name": "job", "folder": str(tmp_path), **options}
        request = ProposalRequest(data=str(path), policy=str(models / policy), **settings)
        proposal = propose_job(request)
        config = override_config(place_document(proposal.document, tmp_path), [], source="job.toml")
        return proposal, config

    return propose


DATA = {
    "worked solutions of GSM8K": (
        ".jsonl",
        [{"question": f"{n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(ROWS)],
        ("question", "answer", "numeric"),
    ),
    "numbers in CSV": (
        ".csv",
        [{"id": n, "problem": f"What is {n} times 3?", "solution": 3 * n} for n in range(ROWS)],
        ("problem", "solution", "numeric"),
    ),
    "chats in Parquet": (
        ".parquet",
        [{"messages": chat(f"Double {n}."), "ground_truth": str(2 * n)} for n in range(ROWS)],
        ("messages", "ground_truth", "numeric"),
    ),
    "nested answers": (
        ".parquet",
        [
            {"prompt": f"Double {n}.", "reward_model": {"style": "rule", "ground_truth": str(2 * n)}}
            for n in range(ROWS)
        ],
        ("prompt", "reward_model.ground_truth", "numeric"),
    ),
    "instructions in two columns": (
        ".jsonl",
        [
            {"prompt": f"Write {n}.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
            for n in range(ROWS)
        ],
        ("prompt", "answer", "ifeval"),
    ),
    "mathematics": (
        ".jsonl",
        [{"problem": f"Divide {n} by 7.", "answer": formula} for n, formula in enumerate(FORMULAS)],
        ("problem", "answer", "math"),
    ),
    "numbers and a few words": (
        ".jsonl",
        [{"prompt": f"Case {n}?", "answer": "none" if n == 3 else str(n)} for n in range(ROWS)],
        ("prompt", "answer", "math"),
    ),
    "labels": (
        ".jsonl",
        [{"text": f"Review number {n}.", "label": "good" if n % 2 else "bad"} for n in range(ROWS)],
        ("text", "label", "exact_match"),
    ),
    "names": (
        ".jsonl",
        [
            {"query": f"Who is person {n}?", "target": f"Person named {chr(97 + n // 26)}{chr(97 + n % 26)}"}
            for n in range(ROWS)
        ],
        ("query", "target", "exact_match"),
    ),
    "free texts": (
        ".jsonl",
        [{"prompt": f"Tell story {n}.", "response": f"{STORY} {n} of all."} for n in range(ROWS)],
        ("prompt", "response", "f1"),
    ),
    "schemas": (
        ".jsonl",
        [{"instruction": f"Describe person {n}.", "schema": SCHEMA} for n in range(ROWS)],
        ("instruction", "schema", "json_schema"),
    ),
    "documents": (
        ".jsonl",
        [{"prompt": f"Extract {n}.", "output": json.dumps({"name": f"n{n}", "age": n})} for n in range(ROWS)],
        ("prompt", "output", "json_schema"),
    ),
}
"""Suffix, rows, and the expected prompt column, answer column and reward, by the kind of data."""


@pytest.mark.parametrize("policy", ["chat", "plain"])
@pytest.mark.parametrize("kind", DATA)
def test_the_job_that_is_proposed_for_data_fits_them_and_passes_the_input_check(kind, policy, propose):
    suffix, rows, (prompt, answer, reward) = DATA[kind]
    if kind == "chats in Parquet" and policy == "plain":
        with pytest.raises(BadInput, match="tokenizer has no chat template"):
            propose(rows, suffix, policy)
        return
    proposal, config = propose(rows, suffix, policy)
    assert (config.data.prompt_column, config.data.answer_column) == (prompt, answer)
    assert [each.kind for each in config.scoring.rewards] == [reward]
    assert proposal.findings["reward"].startswith(f"{reward}, because ")
    inputs = Inputs.model_validate_json(config.model_dump_json())
    facts = check(inputs).facts
    assert facts["too_long"] == 0
    assert facts["longest_prompt_tokens"] + config.rollout.sampling.max_new_tokens <= facts["context"]


def test_the_reason_for_a_reward_counts_the_answers(propose):
    _, rows, _ = DATA["numbers and a few words"]
    proposal, _ = propose(rows)
    assert (
        proposal.findings["reward"]
        == "math, because 98% of 40 answers are numbers, and math can compare the others too"
    )


def test_every_chosen_value_has_its_reason_as_a_comment(propose):
    proposal, _ = propose(DATA["labels"][1])
    for key in ("iterations", "prompts", "max_new_tokens", "learning_rate", "microbatch_tokens", "threads"):
        [line] = [line for line in proposal.document.splitlines() if line.startswith(f"{key} = ")]
        assert " # " in line


def test_the_instruction_lists_the_labels(propose):
    rows = DATA["labels"][1]
    _, config = propose(rows)
    assert config.data.system == "Answer with one of these and nothing else: bad, good."
    _, config = propose(rows, policy="plain")
    assert config.data.template == "{prompt}\n\nAnswer with one of these and nothing else: bad, good.\n"


def test_prompts_that_already_ask_for_the_mark_get_no_instruction(propose):
    rows = [{"prompt": f"{n} + 1? Write #### and the number.", "answer": str(n + 1)} for n in range(ROWS)]
    _, config = propose(rows, policy="plain")
    assert config.data.template == "{prompt}\n"


@pytest.mark.parametrize(
    ("answers", "is_proposed"), [(["7", "8"], False), (["1 + 6 = 7 #### 7", "8 #### 8"], True), (["good", "bad"], True)]
)
def test_training_on_the_answers_is_only_proposed_if_the_reward_accepts_them(answers, is_proposed, propose):
    rows = [{"prompt": f"Question {n}", "answer": answers[n % 2]} for n in range(ROWS)]
    proposal, config = propose(rows)
    reward = build_reward(config.scoring.rewards[0])
    assert {reward("", answer, answer) for answer in answers} == {float(is_proposed)}
    assert ("# [warmup]" in proposal.document) == is_proposed


def test_a_judge_is_proposed_for_free_texts_and_for_data_without_answers(propose, models):
    for rows in (DATA["free texts"][1], [{"prompt": f"Write poem {n}."} for n in range(ROWS)]):
        _, config = propose(rows, judge=str(models / "chat"))
        assert config.scoring.rewards[0].kind == "judge"
        check(Inputs.model_validate_json(config.model_dump_json()))


def test_a_rubric_is_used_if_a_judge_is_named(propose, models):
    rows = [{"prompt": f"Write poem {n}.", "rubric": [{"criterion": "Rhymes", "points": 5}]} for n in range(ROWS)]
    _, config = propose(rows, judge=str(models / "chat"))
    assert (config.data.rubric_column, config.scoring.rewards[0].verdict.kind) == ("rubric", "rubric")
    check(Inputs.model_validate_json(config.model_dump_json()))


def test_adapters_are_proposed_if_all_weights_do_not_fit_in_the_memory(propose):
    proposal, config = propose(DATA["labels"][1], memory=64 * 1024)
    assert config.update.lora is not None
    assert config.update.learning_rate == pytest.approx(5e-3)
    assert "LoRA adapters of rank 16, because all weights would need" in proposal.findings["training"]


def test_a_machine_with_gpus_gets_a_worker_and_a_rank_for_each(propose):
    _, config = propose(DATA["labels"][1], gpus=2, memory=80 * GIB)
    assert (config.pools.workers.max, config.pools.update_ranks, config.pools.gpus_per_worker) == (2, 2, 1)
    assert config.update.dtype == "bfloat16"


@pytest.mark.parametrize(("gpus", "memory"), [(1, 24 * GIB), (8, 80 * GIB)])
def test_a_job_for_gpus_generates_in_the_precision_of_training_and_passes_the_check(gpus, memory, propose):
    proposal, config = propose(DATA["labels"][1], gpus=gpus, memory=memory)
    assert (config.rollout.engine.kind, config.rollout.engine.dtype) == ("transformers", "bfloat16")
    assert "rheostat engine install vllm" in proposal.document
    facts = check(Inputs.model_validate_json(config.model_dump_json())).facts
    held = sum(facts[f"update_{name}_bytes"] for name in ("weights", "gradient", "optimizer"))
    assert held + facts["rollout_weights_bytes"] + facts["rollout_cache_bytes"] < memory
    document = proposal.document.replace('kind = "transformers"', 'kind = "vllm"')
    lines = [line for line in document.splitlines() if not line.startswith("max_batch_rows")]
    assert override_config(tomllib.loads("\n".join(lines)), [], source="job.toml").rollout.engine.dtype == "bfloat16"


def test_the_memory_of_a_large_policy_is_divided_among_the_gpus():
    full, outline = UpdateConfig(dtype="bfloat16"), ModelOutline("Qwen3ForCausalLM", 8 * 10**9, {})
    assert propose_lora(full, outline, Machine(1, 80 * GIB, 8)) is not None
    assert propose_lora(full, outline, Machine(8, 80 * GIB, 8)) is None


@pytest.mark.parametrize(("memory", "fits"), [(400, True), (80, False), (24, False)])
def test_the_completions_of_a_batch_on_a_gpu_fit_in_its_memory(memory, fits):
    update, outline = UpdateConfig(dtype="bfloat16"), ModelOutline("Qwen3ForCausalLM", 6 * 10**8, {})
    shape = ModelShape(6 * 10**8, context=4096, layers=28, heads=16, kv_heads=8, head_size=128)
    [rows, twice] = [
        propose_batch_rows(
            update, outline, shape, longest=2000, completions=512, machine=Machine(1, size * GIB, 8)
        ).value
        for size in (memory, 2 * memory)
    ]
    assert (rows == 512) == fits
    token_bytes = 2 * 28 * 8 * 128 * 2
    assert 0 < rows * 2000 * token_bytes < memory * GIB
    assert rows <= twice


def test_prompts_without_room_for_a_completion_are_dropped_and_counted(propose):
    rows = [{"prompt": "a " * (3 if n else 5000), "answer": str(n)} for n in range(ROWS)]
    rows = [{**row, "prompt": f"{n} {row['prompt']}"} for n, row in enumerate(rows)]
    proposal, config = propose(rows)
    assert config.data.on_too_long == "drop"
    assert "excludes 1 problem that leaves no room" in proposal.document
    assert check(Inputs.model_validate_json(config.model_dump_json())).facts["too_long"] == 1


def test_the_columns_that_the_user_names_are_used(propose):
    rows = [{"question": f"{n}?", "problem": f"{n}!", "answer": "no", "solution": str(n)} for n in range(ROWS)]
    _, config = propose(rows, prompt_column="problem", answer_column="solution")
    assert (config.data.prompt_column, config.data.answer_column) == ("problem", "solution")


@pytest.mark.parametrize(
    ("rows", "options", "parts"),
    [
        ([{"question": "a", "problem": "b", "answer": 1}], {}, ["question ('a'), problem ('b')", "--prompt-column"]),
        ([{"prompt": "a", "answer": 1, "gold": 2}], {}, ["answer ('1'), gold ('2')", "--answer-column"]),
        ([{"left": "a", "right": "b"}], {}, ["left ('a'), right ('b')", "--prompt-column"]),
        ([{"prompt": "a", "answer": 1}], {"prompt_column": "promt"}, ["--prompt-column is 'promt'", "prompt, answer"]),
        ([{"prompt": f"a{n}", "note": "b"} for n in range(9)], {}, ["--answer-column", "--judge", "note"]),
        ([{"prompt": "a", "answer": 1}], {}, ["too few problems"]),
        ([], {}, ["is empty"]),
        (
            [{"prompt": "a", "chosen": "b", "rejected": "c"}],
            {},
            ["pairs of texts in columns chosen and rejected", "--prompt-column"],
        ),
        ([{"messages": [*chat("a"), {"role": "assistant", "content": "b"}]}], {}, ["answer of the assistant"]),
    ],
)
def test_data_about_which_the_user_must_decide_is_refused_with_the_option(rows, options, parts, propose):
    with pytest.raises(BadInput) as refused:
        propose(rows, **options)
    assert [part for part in parts if part not in str(refused.value)] == []


def test_names_on_the_hub_are_read_and_written_to_the_job(hub, models, tmp_path):
    rows = "".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(ROWS)).encode()
    hub.add("team/tiny", models / "chat")
    hub.add(
        "team/sums", {"data/train-00000-of-00001.jsonl": rows, "data/test-00000-of-00001.jsonl": rows}, kind="dataset"
    )
    names = {"data": "team/sums", "policy": "team/tiny", "split": "train", "heldout_split": "test"}
    proposal = propose_job(ProposalRequest(name="job", folder=str(tmp_path), memory=16 * GIB, **names))
    document = tomllib.loads(proposal.document)
    assert document["policy"]["path"] == "team/tiny"
    assert {key: document["data"][key] for key in ("path", "split", "heldout_split", "prompt_column")} == {
        "path": "team/sums",
        "split": "train",
        "heldout_split": "test",
        "prompt_column": "question",
    }
    assert "heldout_fraction" not in document["data"]
    assert override_config(place_document(proposal.document, tmp_path), [], source="job.toml").data.heldout_path
    with pytest.raises(BadInput, match="split"):
        propose_job(ProposalRequest(name="job", folder=str(tmp_path), memory=16 * GIB, **{**names, "split": "gone"}))


def test_a_split_of_a_local_file_is_refused(propose):
    with pytest.raises(BadInput, match="--data: split is set, but it only has an effect on a dataset"):
        propose(DATA["labels"][1], split="train")


def test_the_written_toml_is_read_as_the_same_values(propose):
    rows = [{'a "quoted" prompt': f"{n}\u00e9", "answer": f'{{"k": "{n}"}}'} for n in range(ROWS)]
    proposal, config = propose(rows, prompt_column='a "quoted" prompt')
    assert tomllib.loads(proposal.document)["data"]["prompt_column"] == 'a "quoted" prompt'
    assert config.scoring.rewards[0].json_schema["required"] == ["k"]
