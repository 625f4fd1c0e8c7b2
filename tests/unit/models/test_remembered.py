"""Answers of the input check that are kept: given again while nothing has changed, and never otherwise."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from infra.config import PoolsConfig
from infra.errors import BadInput
from models.commands.preflight import Inputs, check
from models.commands.remembered import HEADER_BYTES, KEPT, checks_directory, key_of, remembered
from models.config.algorithms import Grpo
from models.config.data import FileData
from models.config.objectives import UpdateConfig
from models.config.policy import DirectoryPolicy, ScratchPolicy
from models.config.rewards import ScoringConfig
from models.config.rollout import RolloutConfig
from models.config.training import EvaluationConfig
from models.data.problems import load_problems
from models.modeling.policy import build_scratch, save_policy
from models.text.tokenizer import scratch_tokenizer

HOME = Path(__file__).parents[3]


@pytest.fixture
def inputs(tmp_path):
    """A policy in a directory, and problems in a file."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"question {n}", "answer": str(n)}) + "\n" for n in range(40)))
    found = Inputs(
        seed=0,
        data=FileData(path=data, heldout_fraction=0.2),
        policy=DirectoryPolicy(path=tmp_path / "policy"),
        warmup=None,
        preferences=None,
        dpo=None,
        rollout=RolloutConfig(prompts=4),
        scoring=ScoringConfig(),
        algorithm=Grpo(),
        update=UpdateConfig(),
        pools=PoolsConfig(),
        evaluation=EvaluationConfig(problems=1),
    )
    tokenizer = scratch_tokenizer(ScratchPolicy(), load_problems(found.data, "train", 0))
    save_policy(build_scratch(ScratchPolicy(), tokenizer, seed=0), tokenizer, tmp_path / "policy")
    return found


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "checks"


def kept(cache):
    return sorted(path.name for path in cache.iterdir())


def test_an_answer_is_given_again_without_a_look_at_the_models(inputs, cache):
    facts = check(inputs, cache=cache)
    assert facts == check(inputs)
    assert len(kept(cache)) == 1
    code = (
        "import sys, json\nfrom pathlib import Path\nfrom models.commands.preflight import Inputs, check\n"
        "facts = check(Inputs.model_validate_json(sys.argv[1]), cache=Path(sys.argv[2]))\n"
        "print(json.dumps([facts, 'transformers' in sys.modules]))"
    )
    question = [sys.executable, "-c", code, inputs.model_dump_json(), str(cache)]
    environment = os.environ | {"PYTHONPATH": str(HOME)}
    again = subprocess.run(question, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(again.stdout) == [facts, False]


def touch_the_weights(inputs):
    os.utime(inputs.policy.path / "model.safetensors", ns=(1, 1))
    return inputs


def say_something_else_of_the_tokenizer(inputs):
    path = inputs.policy.path / "tokenizer_config.json"
    path.write_text(path.read_text() + " ")
    return inputs


def ask_another_question(inputs):
    text = inputs.data.path.read_text()
    inputs.data.path.write_text(text.replace("question 7", "question 777"))
    return inputs


def configure_otherwise(inputs):
    return inputs.model_copy(update={"update": UpdateConfig(zero_stage=1)})


@pytest.mark.parametrize(
    "change", [touch_the_weights, say_something_else_of_the_tokenizer, ask_another_question, configure_otherwise]
)
def test_what_has_changed_is_looked_at_again(inputs, cache, change):
    check(inputs, cache=cache)
    changed = change(inputs)
    assert check(changed, cache=cache) == check(changed)
    assert len(kept(cache)) == 2


def test_rewards_and_data_are_checked_whatever_is_kept(inputs, cache):
    check(inputs, cache=cache)
    with pytest.raises(BadInput, match="exceeds the"):
        check(inputs.model_copy(update={"evaluation": EvaluationConfig(problems=4000)}), cache=cache)


def test_a_refusal_is_not_kept(inputs, cache):
    (inputs.policy.path / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        check(inputs, cache=cache)
    assert not cache.exists()


def test_a_damaged_answer_is_found_again(tmp_path):
    def ask():
        return remembered(tmp_path, lambda: "key", lambda: {"parameters": 3})

    for damaged in ("", "{", "[]", '{"parameters": "many"}'):
        (tmp_path / "key").write_text(damaged)
        assert ask() == {"parameters": 3}
        assert json.loads((tmp_path / "key").read_text()) == {"parameters": 3}


def test_what_changes_while_it_is_looked_at_is_not_kept(tmp_path):
    keys = iter(("before", "after"))
    assert remembered(tmp_path, lambda: next(keys), lambda: {"parameters": 3}) == {"parameters": 3}
    assert kept(tmp_path) == []


def test_the_newest_answers_are_kept_and_nobody_else_reads_them(tmp_path):
    cache = tmp_path / "checks"
    for number in range(KEPT + 3):
        remembered(cache, lambda number=number: f"{number:04}", lambda: {"parameters": 3})
        os.utime(cache / f"{number:04}", ns=(number + 1, number + 1))
    assert kept(cache) == [f"{number:04}" for number in range(3, KEPT + 3)]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    assert remembered(tmp_path / "file" / "checks", lambda: "key", lambda: {"parameters": 3}) == {"parameters": 3}


def test_answers_lie_where_the_user_wants_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checks_directory() == tmp_path / "rheostat" / "checks"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert checks_directory() == Path.home() / ".cache" / "rheostat" / "checks"


def test_a_file_that_says_it_is_all_header_is_not_read_whole(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((2**39).to_bytes(8, "little"))
        file.truncate(2**40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert key_of(DirectoryPolicy(path=tmp_path))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 3 * HEADER_BYTES
