"""Tools in a separate process: the policy reads errors of its calls, and a tool that breaks fails the episode."""

from contextlib import contextmanager

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.child import user_interpreter
from rheostat.infra.processes.episodes import EpisodeProcess
from rheostat.models.config.environments import ToolsEnvironment
from rheostat.models.text.calls import Call
from tests.support.environments import episode_with_calls

TOOLS = ToolsEnvironment(tools=("tests.support.games:price",))


@contextmanager
def describing(settings: ToolsEnvironment):
    """Start a process that describes and runs tools. The process is killed afterwards."""
    process = EpisodeProcess(settings.run.with_schemas(), user_interpreter(), seconds=20)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def tools():
    with describing(TOOLS) as process:
        process.ready()
        yield process


def call_tools(tools, *calls: Call):
    step, failure = tools.step(episode_with_calls(*calls))
    tools.end(["0"])
    return failure if step is None else [(each.role, each.name, each.content) for each in step.messages] or step.done


def test_calls_are_answered_in_order(tools):
    calls = Call("price", {"item": "bread"}), Call("price", {"item": "ale", "count": 3})
    assert call_tools(tools, *calls) == [("tool", "price", "5 crowns"), ("tool", "price", "9 crowns")]


def test_a_turn_without_a_call_ends_the_episode(tools):
    assert call_tools(tools) is True


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Call("prize", {}), "Error: no tool 'prize'; the tools are price"),
        (Call("price", {}), "Error: price: missing a required argument: 'item'"),
        (Call("price", {"item": "stone"}), "Error: nobody sells a stone"),
        (Call("", {}, "the JSON ends too early"), "Error: the JSON ends too early"),
    ],
)
def test_the_policy_reads_the_errors_of_its_calls(tools, call, message):
    assert call_tools(tools, call) == [("tool", call.name or "", message)]


def test_a_tool_that_breaks_fails_its_episode_and_no_other(tools):
    assert call_tools(tools, Call("price", {"item": "bug"})) == "RuntimeError: no database"
    assert call_tools(tools, Call("price", {"item": "bread"})) == [("tool", "price", "5 crowns")]


def test_schemas_of_tools_follow_from_types_and_docstrings(tools):
    [schema] = tools.schemas
    parameters = schema["function"]["parameters"]
    assert schema["function"]["name"] == "price"
    assert parameters["properties"]["item"] == {"type": "string", "description": "What is bought."}
    assert parameters["required"] == ["item"]


def test_a_tool_that_cannot_be_described_is_refused_in_one_line():
    settings = ToolsEnvironment(tools=("tests.support.games:Bad",))
    with describing(settings) as process, pytest.raises(BadInput, match=r"\A.*tool 'Bad'.*\Z"):
        process.ready()
