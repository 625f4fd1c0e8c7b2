"""Examples that a small judge learns from: the data's problems with right and wrong completions. Torch-free."""

import re
from collections.abc import Sequence
from random import Random
from typing import Final

from infra.errors import BadInput
from models.config import DataConfig, WarmupConfig
from models.data import Example, Problem, identity, load_problems
from models.judges.questions import fill_template
from models.rewards.config import ChoiceVerdict, JudgeReward, LogprobVerdict, VerdictConfig
from models.seeds import derive_seed

_NUMBER: Final = re.compile(r"\d+")
_STEP: Final = re.compile(r"(\d+)([+-])(\d+)=(\d+)")
_BROKEN_SHARE: Final = 0.1  # of wrong completions that are no answer at all: cut short, or without a number


def judge_examples(data: DataConfig, reward: JudgeReward, warmup: WarmupConfig, seed: int) -> list[Example]:
    """Draw the examples of all training steps, in order: as many right completions as wrong ones."""
    right, wrong = verdict_texts(reward.verdict)
    problems = load_problems(data, "train", seed)
    if not all(problem.answer for problem in problems):
        raise BadInput("a judge is trained on right and wrong answers: set data.answer_column")
    rng = Random(f"{seed}/judge")
    examples: list[Example] = []
    for index in range(warmup.steps * warmup.batch_size):
        problem, is_right = rng.choice(problems), rng.random() < 0.5
        completion = _right(problem, rng) if is_right else _wrong(problem, problems, rng)
        question = question_about(problem, completion, template=reward.template, seed=derive_seed("judge", seed, index))
        examples.append((question, right if is_right else wrong))
    return examples


def question_about(problem: Problem, completion: str, *, template: str, seed: int) -> str:
    """Return the question as the judge will see it."""
    return fill_template(
        template, prompt=identity(problem.prompt), completion=completion, answer=problem.answer, seed=seed
    )


def verdict_texts(verdict: VerdictConfig) -> tuple[str, str]:
    """Return what a judge answers about a right completion, and about a wrong one."""
    match verdict:
        case ChoiceVerdict():
            choices = verdict.choices
            return max(choices, key=lambda text: choices[text]), min(choices, key=lambda text: choices[text])
        case LogprobVerdict():
            return verdict.yes, verdict.no
        case _:
            raise BadInput(
                f"a trained judge answers with one of several texts: expected a verdict of kind choice or logprob, "
                f"found {verdict.kind}"
            )


def _right(problem: Problem, rng: Random) -> str:
    return _shortened(problem.worked or problem.answer, rng)


def _wrong(problem: Problem, problems: Sequence[Problem], rng: Random) -> str:
    """Make a completion that ends in another answer, or before it."""
    if rng.random() < _BROKEN_SHARE:
        return _broken(problem, rng)
    draw = rng.random()
    if problem.worked is None:
        other = rng.choice(problems).answer
        return other if other != problem.answer and draw < 0.5 else _other_number(problem.answer, rng)
    return _shortened(_slipped(problem.worked, rng) if draw < 0.5 else _other_number(problem.worked, rng), rng)


def _shortened(worked: str, rng: Random) -> str:
    """Leave out all steps half of the time: what is learnt of short texts carries over to long ones."""
    steps = list(_STEP.finditer(worked))
    return worked[steps[-1].end() :].lstrip() if steps and rng.random() < 0.5 else worked


def _broken(problem: Problem, rng: Random) -> str:
    """Stop before the answer: at the latest before the last number."""
    text = problem.worked or problem.answer
    numbers = list(_NUMBER.finditer(text))
    end = numbers[-1].start() if numbers else 0
    return text[: rng.randint(1, end)] if end else "I do not know."


def _slipped(worked: str, rng: Random) -> str:
    """Get one step wrong and go on from there, so that the answer is wrong too."""
    steps = list(_STEP.finditer(worked))
    at = rng.randrange(len(steps))
    results = [int(step[4]) for step in steps]
    slips = [slip for slip in range(-5, 6) if slip and min(results[at:]) + slip >= 0 and max(results[at:]) + slip <= 20]
    if not slips:
        return _other_number(worked, rng)
    slip = rng.choice(slips)
    shown = [
        f"{int(step[1]) + slip * (index > at)}{step[2]}{step[3]}={results[index] + slip * (index >= at)}"
        for index, step in enumerate(steps)
    ]
    return " ".join((*shown, f"#### {results[-1] + slip}"))


def _other_number(text: str, rng: Random) -> str:
    """Replace the last number by another of its size; a text without a number says nothing."""
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return f"not {text}"
    last = numbers[-1]
    limit = max(20, 2 * int(last[0]))
    other = rng.choice([number for number in _nearby(int(last[0]), limit, rng) if number != int(last[0])])
    return text[: last.start()] + str(other) + text[last.end() :]


def _nearby(number: int, limit: int, rng: Random) -> list[int]:
    return [rng.randint(0, limit) for _ in range(4)] + [number + 1]
