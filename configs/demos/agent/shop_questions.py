"""Questions with one multiplication each, which are almost only answered with the tool of shop_agent.py.

    system: Answer after ####.
    user: Cleo has 12 boxes of 7 pens. How many?
    assistant: <tool_call>{"name": "multiply", "arguments": {"left": 12, "right": 7}}</tool_call>
    tool: 84
    assistant: #### 84

A guess is almost never right, and an answer after a call almost always, so the policy earns rewards by calling.
"""

from random import Random
from typing import Final

from pydantic import JsonValue

from rheostat.models.config.data import GeneratedData
from rheostat.models.data.generated import sample_problems
from rheostat.models.data.problems import Message, Problem, TemplateArguments

NAMES: Final = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Max", "Tom", "Zoe")
THINGS: Final = ("books", "coins", "cups", "eggs", "keys", "nuts", "pens", "toys")
SMALLEST, LARGEST = 2, 12

INSTRUCTIONS: Final = "Answer after ####."
"""Instructions of the agent, which are the system message of its requests."""
NUMBER: Final[JsonValue] = {"type": "integer"}
MULTIPLY: Final[dict[str, JsonValue]] = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {"type": "object", "properties": {"left": NUMBER, "right": NUMBER}},
    },
}
"""Tool of the agent, with the fields that the chat template renders."""


class ShopData(GeneratedData):
    """Settings of the generated questions."""

    implementation = "shop_questions:shop_problems"
    max_guess = 144


def shop_problems(data: ShopData, split: str, seed: int) -> list[Problem]:
    """Generate the problems of a split ("train" or "heldout"). The same seed gives the same problems."""
    rng = Random(f"{seed}/{split}/shop")
    return sample_problems(data, lambda source: _sample_problem(rng, source), split)


def _sample_problem(rng: Random, source: str) -> Problem:
    """Sample one problem. Its prompt is the first request of the agent, and its worked solution consists of a turn that
    calls the tool, the tool's result, and a turn with the answer."""
    left, right = (rng.randint(SMALLEST, LARGEST) for _ in range(2))
    question = f"{rng.choice(NAMES)} has {left} boxes of {right} {rng.choice(THINGS)}. How many?"
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"left": {left}, "right": {right}}}}}</tool_call>'
    answer = f"#### {left * right}"
    turns = (call, f"\ntool: {left * right}\nassistant: ", answer)
    return Problem(
        source=source,
        prompt=(Message("system", INSTRUCTIONS), Message("user", question)),
        answer=answer,
        worked="".join(turns),
        worked_turns=turns,
        columns={"question": question},
        template=TemplateArguments(tools=(MULTIPLY,)),
    )
