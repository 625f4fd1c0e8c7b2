"""Episodes of evaluation suites with tasks of local files: items of lm-eval, samples of Inspect, and their scores."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.agents import AgentHosts
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.registry import open_registry
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.models.agents.runtime import describe_agent
from rheostat.models.commands.preflight import Inputs, check
from rheostat.models.config.agents import InspectEnvironment, LmEvalEnvironment
from rheostat.models.config.data import InspectData, LmEvalData
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.config.policy import DirectoryPolicy
from rheostat.models.data.problems import load_problems
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion
from rheostat.tasks.config.run import RunConfig
from rheostat.tasks.promotion.evidence import problem_scores
from rheostat.tasks.run.batch import Batch
from rheostat.tasks.run.keys import evaluation_key
from tests.support.episodes import Episodes
from tests.support.jobs import ROOT
from tests.support.policies import write_chat_policy

pytestmark = [pytest.mark.suites, pytest.mark.timeout(600)]
SUITES = Path(__file__).parents[2] / "support" / "suites"
WORDS = {"task": "words", "file": SUITES / "words.yaml"}
LETTERS = {"task": "letters", "file": SUITES / "letters_inspect.py"}
LIMITS = {"turn_tokens": 8, "parser": "hermes", "agent_seconds": 300}


@pytest.fixture(scope="module")
def episodes(home):
    """Episodes of four items with a policy that has a chat template. They are sampled greedily."""
    folder = home / "chat"
    write_chat_policy(folder, "qwen-2.5", likely={"<|im_end|>": 0.05, "e": 0.2})
    made = Episodes(home)
    policy = ModelVersion(version=0, weights=publish_bundle(made.store, folder, prefix="policies"))
    sampling = SamplingConfig(max_new_tokens=900, temperature=0.0)
    made.work = replace(made.work, policy=policy, sampling=sampling, rows=(2, 3, 4, 5), group_size=1)
    made.policy = folder
    return made


def play(episodes, data, settings, *, change=lambda task: task):
    """Run the episodes of the problems with the numbers of the work's rows, and return their rows."""
    problems = load_problems(data, "heldout", 0)
    prompts = read_shard(episodes.store, episodes.work.prompts)
    columns = [
        json.dumps({"task": change(problems[row % len(problems)].columns["task"])}) for row in range(prompts.num_rows)
    ]
    prompts = prompts.set_column(prompts.column_names.index("columns"), "columns", pa.array(columns))
    rows = episodes.play_rows(settings, prompts=write_shard(episodes.store, prompts, kind="prompts", metadata={}))
    return sorted(rows, key=lambda row: row["prompt_row"])


def rewards_of(rows):
    assert [row["turns"][-1]["error"] for row in rows] == [None] * len(rows)
    return [row["turns"][-1]["reward"] for row in rows]


def errors_of(rows):
    assert {row["finish_reason"] for row in rows} == {"failed"}
    return {row["turns"][-1]["error"] for row in rows}


def test_the_score_of_a_choice_is_decided_by_the_likelihoods_of_the_policy(episodes):
    rewards = rewards_of(play(episodes, LmEvalData(**WORDS), LmEvalEnvironment(**WORDS, **LIMITS)))
    engine = HuggingFaceEngine(TransformersEngine())
    engine.load(episodes.policy, episodes.work.policy)
    tokenizer, expected = engine._policy.tokenizer, []
    items = [json.loads(line) for line in (SUITES / "words.jsonl").read_text().splitlines()]
    for item in items[2:6]:
        prompt = ModelInput.from_prompt(tokenizer(item["question"])["input_ids"])
        [likelihoods] = engine.score_continuations([prompt], [tokenizer(text)["input_ids"] for text in item["choices"]])
        expected.append(float(max(range(2), key=likelihoods.__getitem__) == item["label"]))
    assert rewards == expected
    assert len({*rewards}) == 2


def test_generated_answers_are_scored_and_recorded(episodes):
    task = {"task": "words_gen", "file": SUITES / "words_gen.yaml"}
    rows = play(episodes, LmEvalData(**task), LmEvalEnvironment(**task, **LIMITS, apply_chat_template=True))
    for row, reward in zip(rows, rewards_of(rows), strict=True):
        [turn] = row["turns"]
        assert 0 < turn["tokens"] <= 6
        assert reward == float(turn["text"].strip() == "e")


def test_the_items_of_a_group_are_scored_by_their_tasks_which_take_turns(episodes):
    group = {"task": "both", "file": SUITES / "both.yaml"}
    items = [each.columns["task"] for each in load_problems(LmEvalData(**group), "heldout", 0)]
    assert [(each["member"], each["number"]) for each in items[:4]] == [
        ("words", 0), ("words_gen", 0), ("words", 1), ("words_gen", 1)
    ]  # fmt: skip
    rows = play(episodes, LmEvalData(**group), LmEvalEnvironment(**group, **LIMITS))
    single = play(episodes, LmEvalData(**WORDS), LmEvalEnvironment(**WORDS, **LIMITS))
    assert [len(row["turns"]) for row in rows] == [2, 1, 2, 1]
    assert rewards_of(rows)[2] == rewards_of(single)[0]


def test_an_item_that_exceeds_the_context_fails_with_a_reason(episodes):
    options = {"description": "x " * 2000}
    data, environment = LmEvalData(**WORDS, options=options), LmEvalEnvironment(**WORDS, **LIMITS, options=options)
    [error] = errors_of(play(episodes, data, environment))
    assert "maximum context length" in error


def test_an_item_that_has_changed_since_it_was_read_fails(episodes):
    rows = play(
        episodes,
        LmEvalData(**WORDS),
        LmEvalEnvironment(**WORDS, **LIMITS),
        change=lambda task: {**task, "digest": "0"},
    )
    [error] = errors_of(rows)
    assert "the item has changed" in error


def test_the_scores_of_inspect_are_those_of_the_policys_answers(episodes):
    rows = play(episodes, InspectData(**LETTERS), InspectEnvironment(**LETTERS, **LIMITS))
    for row, reward in zip(rows, rewards_of(rows), strict=True):
        letter = "abcdefghij"[row["prompt_row"]]
        assert f"Write the letter {letter}." in [each["content"] for each in row["messages"]]
        assert reward == float(letter in row["messages"][-1]["content"].lower())
    rows = play(episodes, InspectData(**LETTERS), InspectEnvironment(**LETTERS, **LIMITS, scorer="length"))
    assert rewards_of(rows) == [len(row["messages"][-1]["content"]) for row in rows]


def test_a_sample_that_cannot_be_scored_fails_with_a_reason(episodes):
    options = {"fails": True}
    data, environment = (
        InspectData(**LETTERS, options=options),
        InspectEnvironment(**LETTERS, **LIMITS, options=options),
    )
    [error] = errors_of(play(episodes, data, environment))
    assert "no tests were found" in error


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (LmEvalEnvironment(**WORDS, metric="acc_nrom"), "the task has no metric 'acc_nrom'. Use one of acc, acc_norm"),
        (LmEvalEnvironment(**WORDS, filter="strict"), "the task has no filter 'strict'. Use one of none"),
        (
            InspectEnvironment(**LETTERS, scorer="lenght"),
            "the task has no scorer 'lenght'. Use one of includes, length",
        ),
    ],
)
def test_a_score_that_does_not_exist_is_refused_before_the_run(environment, expected, tmp_path):
    hosts = AgentHosts(*describe_agent(environment), tmp_path)
    with pytest.raises(BadInput, match=re.escape(expected)):
        hosts.check()
    hosts.close()


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("lm_eval", {**WORDS, "task": "wrods"}, "task 'wrods': there is no task or group with this name in words.yaml"),
        (
            "lm_eval",
            {"task": "both", "file": SUITES / "both.yaml", "options": {"num_fewshot": 2}},
            "options can be set only for a single task",
        ),
        ("lm_eval", {**WORDS, "options": {"dataset_kwargs": {"data_files": {"test": "no.jsonl"}}}}, "no.jsonl"),
        ("lm_eval", {"task": "wrods"}, "task 'wrods': there is no task or group with this name"),
        (
            "inspect",
            {**LETTERS, "task": "leters"},
            "task 'leters': there is no task with this name in letters_inspect.py",
        ),
        ("inspect", {"task": "inspect_evals/gsm8k"}, "there is no task with this name in an installed package"),
        ("inspect", {"task": "nothing", "file": SUITES / "words.yaml"}, "Invalid extension for task file: .yaml"),
        ("inspect", {**LETTERS, "options": {"fail": True}}, "unexpected keyword argument 'fail'"),
    ],
)
def test_a_task_that_cannot_be_loaded_is_named_in_one_line(kind, fields, expected, tmp_path):
    data, environment = {"lm_eval": (LmEvalData, LmEvalEnvironment), "inspect": (InspectData, InspectEnvironment)}[kind]
    with pytest.raises(BadInput, match=re.escape(expected)) as refused:
        load_problems(data(**fields), "heldout", 0)
    assert "\n" not in str(refused.value)
    hosts = AgentHosts(*describe_agent(environment(**fields)), tmp_path)
    with pytest.raises(BadInput, match=re.escape(expected)) as refused:
        hosts.check()
    hosts.close()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("task", ["words", "words_gen"])
@pytest.mark.parametrize("engine", ["target", "transformers"])
def test_likelihoods_are_refused_before_a_run_whose_engine_cannot_compute_them(episodes, task, engine):
    tables = {"task": task, "file": SUITES / f"{task}.yaml"}
    target = {"target": "tests.support.engines:Unscored"} if engine == "target" else {}
    config = RunConfig(
        iterations=0,
        policy=DirectoryPolicy(path=episodes.policy),
        data=LmEvalData(**tables),
        rollout={
            "environment": LmEvalEnvironment(**tables, **LIMITS),
            "engine": {"kind": engine, **target},
            "sampling": {"max_new_tokens": 900},
            "prompts": 1,
        },
        scoring={"rewards": [{"kind": "environment"}]},
        evaluation={"problems": 4},
    )
    inputs = Inputs.model_validate_json(config.model_dump_json())
    if (task, engine) == ("words", "target"):
        with pytest.raises(BadInput, match=r"Set rollout\.engine\.kind = 'transformers' or 'vllm'"):
            check(inputs)
    else:
        check(inputs)


@pytest.mark.parametrize(("suite", "items"), [("choices", 40), ("sums", 40), ("letters", 30)])
def test_a_policy_that_is_compared_with_itself_has_no_differences(suite, items, tmp_path, monkeypatch):
    """The suites are those of the page. The update of the retrain changes almost nothing."""
    write_page(tmp_path)
    monkeypatch.chdir(tmp_path)
    settings = [*SETTINGS, f"promotion.primary={{suite='{suite}',range=[0.0,1.0]}}"]
    command = [sys.executable, "-m", "rheostat", "retrain", "job.toml", "--day", "2026-11-02", *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = open_registry("runs", "assistant").records()
    assert record.kind == "keep"
    runs = [open_run("runs", f"assistant-20261102.{suite}.{side}") for side in ("initial", "challenger")]
    scores = [problem_scores(Batch.read(run, evaluation_key(0)), ["environment"])["environment"] for run in runs]
    assert scores[0] == scores[1]
    assert len(scores[0]) == items and {score for [score] in scores[0].values()} <= {0.0, 1.0}


SETTINGS = [
    "policy.path=policy",
    "iterations=1",
    "report=false",
    "pools.cluster=threads",
    "pools.workers=1",
    "rollout.prompts=2",
    "rollout.group_size=2",
    "rollout.sampling.max_new_tokens=8",
    "update.learning_rate=1e-12",
    "evaluation.problems=4",
]


def blocks_of(kind, page="public-suites"):
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)


def write_page(folder):
    """Write the files of the page, problems for the retrain, and a policy. The harness of verifiers is a simple one,
    which is fast."""
    [task], [items, module], [taskset] = blocks_of("yaml"), blocks_of("python"), blocks_of("python", "verifiers")
    problems = "".join(
        json.dumps({"prompt": f"{number} + 1 =", "answer": str(number + 1)}) + "\n" for number in range(60)
    )
    job = "".join(blocks_of("toml")).replace(
        '{ id = "null" }', '{ id = "hanging_harness", options = { seconds = "0" } }'
    )
    files = {"choices.yaml": task, "sums.py": module, "items.py": items, "letters_taskset.py": taskset}
    for name, text in {**files, "problems.jsonl": problems, "job.toml": job}.items():
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "items.py"], cwd=folder, check=True)
    shutil.copy(SUITES.parent / "tasksets" / "hanging_harness.py", folder)
    write_chat_policy(folder / "policy", "qwen-2.5", likely={"<|im_end|>": 0.05})
