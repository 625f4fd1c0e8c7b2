"""Faults of a retrain's suites that are found before training: training problems in a suite, and other tokenizers."""

import json
from pathlib import Path

import pytest

from rheostat.flows.cli.app import main
from rheostat.infra.errors import BadInput
from rheostat.models.config.policy import DirectoryPolicy, ScratchPolicy
from rheostat.models.data.problems import load_problems
from rheostat.models.inspection.other_models import check_same_tokens
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.text.tokenizer import scratch_tokenizer
from tests.support.demos import ArithmeticData

RULES = """
store = "{store}"
[data]
kind = "file"
path = "{home}/train.jsonl"
heldout_path = "{home}/heldout.jsonl"
[rollout]
prompts = 8
[policy]
kind = "scratch"
[evaluation]
problems = 30
[[evaluations]]
name = "rivers"
data = {{kind = "file", path = "{home}/heldout.jsonl", heldout_path = "{home}/suite.jsonl"}}
problems = 40
[promotion]
registry = "assistant"
primary = {{suite = "rivers"}}
"""


def question(number: int, city: str) -> str:
    """Return a question of more than thirteen words, nine of which are in no other question."""
    words = " ".join(f"{city}{number}{part}" for part in "abcdefghi")
    return f"Which river runs through {words} and how many bridges are there, {number} or more?"


def write(path: Path, questions: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": each, "answer": "3"}) + "\n" for each in questions))


@pytest.fixture
def run_gate(tmp_path, capsys):
    """Function that runs `rheostat gate` on a suite of questions and returns exit code and output."""
    write(tmp_path / "train.jsonl", [question(number, "x") for number in range(60)])
    write(tmp_path / "heldout.jsonl", [question(number, "y") for number in range(30)])
    (tmp_path / "job.toml").write_text(RULES.format(home=tmp_path, store=tmp_path / "runs"))

    def run(questions, *words):
        write(tmp_path / "suite.jsonl", questions)
        code = main(["gate", str(tmp_path / "job.toml"), *words])
        return code, capsys.readouterr()

    return run


def test_a_suite_of_training_problems_is_refused_with_their_files_and_lines(run_gate, tmp_path):
    code, output = run_gate([question(number, "x") for number in range(40)])
    assert (code, output.out) == (2, "")
    first = f"{tmp_path}/suite.jsonl:1, {tmp_path}/suite.jsonl:2, "
    assert output.err.startswith(
        "rheostat: suite 'rivers': 40 of 40 problems (40 word for word, 0 nearly) are also training problems: " + first
    )
    assert output.err.endswith("; 100.0% is above promotion.max_contaminated 0.0%\n") and output.err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.system
def test_a_near_copy_of_a_training_problem_counts_as_contaminated(run_gate, tmp_path):
    questions = [f"Please: {question(0, 'x')}", *(question(number, "z") for number in range(39))]
    code, output = run_gate(questions)
    named = f"1 of 40 problems (0 word for word, 1 nearly) are also training problems: {tmp_path}/suite.jsonl:1;"
    assert code == 2 and named in output.err
    code, output = run_gate(questions, "promotion.max_contaminated=0.025")
    assert code == 0 and output.out.startswith("rivers: with 40 problems, a gain")


def test_a_champion_with_another_tokenizer_than_the_policy_is_refused(tmp_path):
    for name, many in (("models", 64), ("champion", 512)):
        policy = ScratchPolicy(hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=1)
        problems = load_problems(ArithmeticData(train_problems=many, heldout_problems=8), "train", many)
        tokenizer = scratch_tokenizer(policy, problems)
        save_policy(build_scratch(policy, tokenizer, seed=1), tokenizer, tmp_path / name)
    configured, champion = (DirectoryPolicy(path=tmp_path / name) for name in ("models", "champion"))
    with pytest.raises(BadInput, match=r"the champion .*has another tokenizer: token"):
        check_same_tokens(configured, champion)
    check_same_tokens(champion, champion)
    check_same_tokens(ScratchPolicy(), champion)
    check_same_tokens(DirectoryPolicy(path=tmp_path / "gone"), champion)
