"""Problems to learn from and to be tested on, made or read."""

from random import Random
from typing import cast

from infra.errors import BadInput
from infra.variants import implementation_of
from models.config.data import DataConfig
from models.config.training import WarmupConfig
from models.data.arithmetic import bare_guess
from models.data.problems import Problem, ProblemSource, Prompt

Example = tuple[Prompt, str]
"""A prompt and the completion that warm-up imitates."""


def load_problems(data: DataConfig, split: str, seed: int) -> list[Problem]:
    """Load the `train` or `heldout` problems in a fixed order; no prompt is in both."""
    assert split in ("train", "heldout"), split
    where = f"data {data.known_as!r}: its {split} problems"
    try:
        problems = [*cast(ProblemSource, implementation_of(data))(data, split, seed)]
    except BadInput:
        raise
    except Exception as error:  # whatever a user's source raises means that there is nothing to learn from
        raise BadInput(f"{where}: making them failed: {type(error).__name__}: {error}") from error
    for problem in problems:
        if not isinstance(problem, Problem):
            raise BadInput(f"{where}: expected models.data.problems.Problem each, found {problem!r:.80}")
    return problems


def warmup_examples(data: DataConfig, warmup: WarmupConfig, seed: int) -> list[Example]:
    """Draw the examples of all warm-up steps, in training order: the training problems, shuffled anew each pass."""
    problems = load_problems(data, "train", seed)
    if not data.has_answers:
        raise BadInput("warmup needs answers to imitate: set data.answer_column, or remove [warmup]")
    rng = Random(f"{seed}/warmup")
    wanted = warmup.steps * warmup.batch_size
    examples: list[Example] = []
    while len(examples) < wanted:
        passing = rng.sample(problems, k=min(len(problems), wanted - len(examples)))
        examples.extend((problem.prompt, _completion(problem, warmup.worked_fraction, rng)) for problem in passing)
    return examples


def _completion(problem: Problem, worked_fraction: float, rng: Random) -> str:
    if problem.worked is None:
        return problem.answer
    return problem.worked if rng.random() < worked_fraction else bare_guess(rng)
