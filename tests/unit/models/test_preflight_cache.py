"""Cached results of the input check: they are used only while no input has changed."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.commands.preflight import Inputs, check
from rheostat.models.commands.preflight_cache import (
    HEADER_BYTES,
    MAX_RESULTS,
    build_key,
    checks_directory,
    find_or_compute,
)
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import DirectoryPolicy, ScratchPolicy
from rheostat.models.config.training import EvaluationConfig
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.policy import build_scratch, save_policy
from rheostat.models.text.tokenizer import scratch_tokenizer
from rheostat.tasks.config.run import override_config
from tests.support.jobs import SEARCH_PATH
from tests.support.json_lines import write_json_lines

RESULT = CheckResult(facts={"parameters": 3}, notes=("Turns end with EOS.",))
HOME = Path(__file__).parents[3]


@pytest.fixture
def inputs(tmp_path):
    """Inputs with a policy in a directory and problems in a file."""
    rows = ({"prompt": f"question {n}", "answer": str(n)} for n in range(40))
    data = write_json_lines(tmp_path / "data.jsonl", rows)
    document = {
        "data": {"kind": "file", "path": str(data), "heldout_fraction": 0.2},
        "policy": {"kind": "directory", "path": str(tmp_path / "policy")},
        "rollout": {"prompts": 4},
        "evaluation": {"problems": 1},
        "warmup": None,
    }
    settings = Inputs.model_validate_json(override_config(document, [], source="job.toml").model_dump_json())
    tokenizer = scratch_tokenizer(ScratchPolicy(), load_problems(settings.data, "train", 0))
    save_policy(build_scratch(ScratchPolicy(), tokenizer, seed=0), tokenizer, tmp_path / "policy")
    return settings


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "checks"


def list_results(cache):
    return sorted(path.name for path in cache.iterdir())


def test_a_cached_result_is_returned_without_importing_model_libraries(inputs, cache):
    result = check(inputs, cache=cache)
    assert result == check(inputs)
    assert len(list_results(cache)) == 1
    code = (
        "import sys, json\nfrom pathlib import Path\nfrom rheostat.models.commands.preflight import Inputs, check\n"
        "result = check(Inputs.model_validate_json(sys.argv[1]), cache=Path(sys.argv[2]))\n"
        "print(json.dumps([result.model_dump(), 'transformers' in sys.modules]))"
    )
    command = [sys.executable, "-c", code, inputs.model_dump_json(), str(cache)]
    again = subprocess.run(command, env=os.environ | {"PYTHONPATH": SEARCH_PATH}, capture_output=True, check=True)
    assert json.loads(again.stdout) == [result.model_dump(mode="json"), False]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("policy/model.safetensors", b"", b""),  # only its time changes
        ("policy/tokenizer_config.json", b"{", b"{ "),
        ("data.jsonl", b"question 7", b"question 777"),
    ],
)
def test_changed_files_are_checked_again(inputs, cache, tmp_path, file, old, new):
    check(inputs, cache=cache)
    (tmp_path / file).write_bytes((tmp_path / file).read_bytes().replace(old, new))
    os.utime(tmp_path / file, ns=(1, 1))
    assert check(inputs, cache=cache) == check(inputs)
    assert len(list_results(cache)) == 2


def test_changed_settings_are_checked_again(inputs, cache):
    check(inputs, cache=cache)
    changed = inputs.model_copy(update={"update": UpdateConfig(zero_stage=1)})
    assert check(changed, cache=cache) == check(changed)
    assert len(list_results(cache)) == 2


def test_rewards_and_data_are_checked_despite_a_cached_result(inputs, cache):
    check(inputs, cache=cache)
    with pytest.raises(BadInput, match="4000"):
        check(inputs.model_copy(update={"evaluation": EvaluationConfig(problems=4000)}), cache=cache)


def test_a_refusal_is_not_cached(inputs, cache):
    (inputs.policy.path / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        check(inputs, cache=cache)
    assert not cache.exists()


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"parameters": "many"}'])
def test_a_damaged_result_is_found_again(tmp_path, damaged):
    (tmp_path / "key").write_text(damaged)
    assert find_or_compute(tmp_path, lambda: "key", lambda: RESULT) == RESULT
    assert CheckResult.model_validate_json((tmp_path / "key").read_text()) == RESULT


def test_a_result_is_not_cached_if_the_inputs_change_during_the_check(tmp_path):
    keys = iter(("before", "after"))
    assert find_or_compute(tmp_path, lambda: next(keys), lambda: RESULT) == RESULT
    assert list_results(tmp_path) == []


def test_the_newest_results_are_kept_and_no_other_user_can_read_them(tmp_path):
    cache = tmp_path / "checks"
    for number in range(MAX_RESULTS + 3):
        find_or_compute(cache, lambda number=number: f"{number:04}", lambda: RESULT)
        os.utime(cache / f"{number:04}", ns=(number + 1, number + 1))
    assert list_results(cache) == [f"{number:04}" for number in range(3, MAX_RESULTS + 3)]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    assert find_or_compute(tmp_path / "file" / "checks", lambda: "key", lambda: RESULT) == RESULT


def test_results_are_stored_in_the_cache_directory_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert checks_directory() == tmp_path / "rheostat" / "checks"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert checks_directory() == Path.home() / ".cache" / "rheostat" / "checks"


def test_a_file_with_a_huge_header_is_not_read_as_a_whole(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((2**39).to_bytes(8, "little"))
        file.truncate(2**40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert build_key(DirectoryPolicy(path=tmp_path))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 3 * HEADER_BYTES
