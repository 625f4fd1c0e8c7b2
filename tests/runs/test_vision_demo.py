"""The vision demo as a new user runs it: accuracy rises for every seed, because the policy uses the pictures."""

import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rheostat.models.data.problems import Problem, load_problems
from rheostat.models.modeling.policy import load_vision
from rheostat.models.text.tokenizer import load_tokenizer, tokenize_problems
from tests.support.demos import demo_module
from tests.support.jobs import RHEOSTAT, demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PICTURES = demo_module("vision", "pictures")
BLANK = PICTURES.draw_cells([None] * PICTURES.CELLS**2)


@pytest.fixture(scope="module", params=[0, 1, 2])
def trained(request, tmp_path_factory):
    """Home of a finished run, its seed and its summary."""
    home = tmp_path_factory.mktemp("vision")
    return home, request.param, demo(home, f"seed={request.param}", config="configs/demos/vision/job.toml")


def answers_of(directory: Path, problems: list[Problem], *, shown: bytes | None) -> list[str]:
    """Have transformers generate greedily, with another picture shown in every problem if one is given."""
    model, vision = AutoModelForImageTextToText.from_pretrained(directory), load_vision(directory)
    tokenizer = load_tokenizer(directory)
    prompts = tokenize_problems(problems, tokenizer, vision.processor)
    said = []
    for problem, prompt in zip(problems, prompts, strict=True):
        seen = vision.processor.prepare(shown or problem.images[0]).arrays
        tokens = torch.from_numpy(prompt.input.tokens).long()[None]
        pixels = {name: torch.from_numpy(array)[None] for name, array in seen.items()}
        ids = model.generate(tokens, **pixels, do_sample=False, max_new_tokens=28)
        said.append(tokenizer.decode(ids[0, tokens.shape[1] :], skip_special_tokens=True).rpartition("####")[2].strip())
    return said


def share_right(directory: Path, problems: list[Problem], *, shown: bytes | None = None) -> float:
    expected = [problem.answer.removeprefix(" #### ") for problem in problems]
    found = answers_of(directory, problems, shown=shown)
    return sum(one == other for one, other in zip(found, expected, strict=True)) / len(problems)


def test_heldout_accuracy_rises_from_a_fifth_at_most_to_nine_tenths_at_least(trained):
    _, _, summary = trained
    assert summary["before"]["mean"] <= 0.2
    assert summary["after"]["mean"] >= 0.9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_verdicts_of_a_vision_judge_train_the_policy_to_count(seed, tmp_path):
    summary = demo(tmp_path, f"seed={seed}", config="configs/demos/vision/vision-judge.toml")
    assert summary["before"]["mean"] <= 0.3
    assert summary["after"]["mean"] >= 0.7


def test_with_blank_pictures_the_policy_is_right_only_if_the_answer_is_zero(trained):
    home, seed, _ = trained
    command = [RHEOSTAT, "export-policy", "vision", "--store", str(home / "runs"), "--to", str(home / "policy")]
    subprocess.run(command, check=True)
    problems = load_problems(PICTURES.PicturesData(), "heldout", seed)
    zeros = sum(problem.answer == " #### 0" for problem in problems) / len(problems)
    assert share_right(home / "policy", problems) >= 0.9
    assert share_right(home / "policy", problems, shown=BLANK) <= zeros + 0.05
