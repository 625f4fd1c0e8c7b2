"""Problems to learn from and to be tested on, made or read."""

from random import Random

from infra.errors import BadInput
from models.config import ArithmeticData, DataConfig, WarmupConfig
from models.data.arithmetic import arithmetic_problems, bare_guess
from models.data.files import file_problems
from models.data.problems import Message, Problem, Prompt, identity, is_heldout

__all__ = ["Example", "Message", "Problem", "Prompt", "identity", "is_heldout", "load_problems", "warmup_examples"]

Example = tuple[Prompt, str]
"""A prompt and the completion that warm-up imitates."""


def load_problems(data: DataConfig, split: str, seed: int) -> list[Problem]:
    """Load the `train` or `heldout` problems in a fixed order; no prompt is in both."""
    assert split in ("train", "heldout"), split
    if isinstance(data, ArithmeticData):
        return arithmetic_problems(data, split, seed)
    return file_problems(data, split)


def warmup_examples(data: DataConfig, warmup: WarmupConfig, seed: int) -> list[Example]:
    """Draw the examples of all warm-up steps, in training order: the training problems, shuffled anew each pass."""
    problems = load_problems(data, "train", seed)
    if not isinstance(data, ArithmeticData) and data.answer_column is None:
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
