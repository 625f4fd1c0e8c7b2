"""Agent of the package openai-agents with one tool. It runs in a Python environment with this package and imports
nothing of Rheostat."""

from typing import Any

from agents import Agent, AgentsException, Runner, function_tool, set_default_openai_api
from openai import BadRequestError

set_default_openai_api("chat_completions")


@function_tool
def multiply(left: int, right: int) -> int:
    """Multiply two numbers."""
    return left * right


agent = Agent(name="Shop", instructions="Answer after ####.", tools=[multiply], model="policy")


async def solve(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Return 1 if the agent's answer is right, and 0 otherwise. The package reads the address and the key from
    environment variables."""
    try:
        result = await Runner.run(agent, problem["question"], max_turns=3)
    except (AgentsException, BadRequestError):  # too many turns, an unknown tool, or a chat that is too long
        return 0.0
    return float(result.final_output == problem["answer"])
