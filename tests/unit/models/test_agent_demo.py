"""The demonstration with an agent: warm-up trains on the tokens that episodes have."""

from rheostat.models.data.problems import Message
from rheostat.models.text.calls import Call, build_parser
from rheostat.models.text.turns import turn_format
from tests.support.openai_agents import problems_and_tokenizer


def test_worked_turns_are_a_call_of_the_tool_and_its_result_as_the_template_renders_it():
    problems, tokenizer = problems_and_tokenizer()
    form = turn_format(tokenizer)
    for problem in problems[:20]:
        call, result, answer = problem.worked_turns
        product = problem.answer.removeprefix("#### ")
        [parsed] = build_parser("auto", tokenizer, tools=problem.template.tools)(call).calls
        assert parsed == Call("multiply", parsed.arguments)
        assert parsed.arguments["left"] * parsed.arguments["right"] == int(product)
        context = form.with_arguments(problem.template).encode_observation([Message("tool", product, "multiply")])
        assert [*context] == tokenizer(result, add_special_tokens=False)["input_ids"]
        assert answer == problem.answer
