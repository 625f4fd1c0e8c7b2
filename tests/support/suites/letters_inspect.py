"""Tasks of Inspect about letters, whose samples call no tool."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, accuracy, includes, scorer
from inspect_ai.solver import TaskState, generate


@scorer(metrics=[accuracy()])
def length():
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=len(state.output.completion))

    return score


@scorer(metrics=[accuracy()])
def failing():
    async def score(state: TaskState, target: Target) -> Score:
        raise RuntimeError("no tests were found")

    return score


@task
def letters(fails: bool = False) -> Task:
    """Write a letter. Samples with an even number have an ID with a character of patterns."""
    samples = [
        Sample(input=f"Write the letter {letter}.", target=letter, id=None if number % 2 else f"{letter}[*]")
        for number, letter in enumerate("abcdefghij")
    ]
    return Task(dataset=samples, solver=generate(), scorer=[failing()] if fails else [includes(), length()])
