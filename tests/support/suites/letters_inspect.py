"""Tasks of Inspect about letters, whose samples call no tool."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser
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
    """Write a letter. The input of samples with an even number is a chat."""
    samples = []
    for number, letter in enumerate("abcdefghij"):
        text = f"Write the letter {letter}."
        samples.append(Sample(input=text if number % 2 else [ChatMessageUser(content=text)], target=letter))
    return Task(dataset=samples, solver=generate(), scorer=[failing()] if fails else [includes(), length()])
