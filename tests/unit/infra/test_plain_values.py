"""Return values of users' functions: numbers of any library, JSON values, and texts that UTF-8 can encode."""

import json
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from rheostat.infra.episode_runner import EpisodeTurn, NoStep, ToolBox, ToolCall, parse_step, shorten_step
from rheostat.infra.plain_values import describe_value, repair_text, to_json_value
from rheostat.infra.runner import InvalidTarget, compute_value, import_target
from rheostat.models.judges.endpoint import read_answer


class Odd:
    """Object whose text contains its address."""

    def method(self): ...


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ([1, None, {"a": 2.5}], "[1, None, {'a': 2.5}]"),
        ("x" * 200, "'" + "x" * 79),
        (json, "module 'json'"),
        (json.dumps, "function 'json.dumps'"),
        (Odd, f"type '{__name__}.Odd'"),
        (Odd().method, f"method '{__name__}.Odd.method'"),
        (len, "builtin_function_or_method 'len'"),
        (Odd(), f"{__name__}.Odd"),
        ([Odd()], "list"),
        ({"a": Odd()}, "dict"),
        (np.zeros(3), "numpy.ndarray of shape (3,)"),
        (partial(len, "a"), "functools.partial"),
    ],
)
def test_a_value_in_a_message_has_no_address(value, text):
    assert describe_value(value) == text


@pytest.mark.parametrize(("target", "what"), [("json:dumps.nothing", "function 'json.dumps'"), ("json:x", "module 'j")])
def test_an_object_without_an_attribute_is_named_without_its_address(target, what):
    with pytest.raises(InvalidTarget, match=rf"^here: {what}[^\n]*has no attribute") as refused:
        import_target(target, "here")
    assert "0x" not in str(refused.value)


def test_a_message_of_an_environment_that_is_an_object_is_named_without_its_address():
    with pytest.raises(NoStep, match=r"returned [\w.]+Odd$"):
        parse_step({"messages": [Odd()]}, role="user")


NUMBERS = [
    (True, 1.0),
    (Decimal("0.25"), 0.25),
    (Fraction(1, 4), 0.25),
    (np.bool_(True), 1.0),
    (np.int8(-3), -3.0),
    (np.float16(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.array(0.5), 0.5),
    (np.array(True), 1.0),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor(2.0, requires_grad=True), 2.0),
    (torch.tensor(False), 0.0),
]
NO_NUMBERS = [
    (np.zeros(3), "expected a float, found numpy.ndarray of shape (3,)"),
    (np.zeros((1, 1)), "expected a float, found numpy.ndarray of shape (1, 1)"),
    (torch.zeros(1), "expected a float, found torch.Tensor of shape (1,)"),
    (np.array("0.5"), "expected a float, found numpy.ndarray of shape ()"),
    (np.complex128(1), "expected a float, found numpy.complex128 of shape ()"),
    (np.timedelta64(3, "s"), "expected a float, found numpy.timedelta64 of shape ()"),
    (torch.empty((), device="meta"), "expected a float, found torch.Tensor of shape ()"),
    (np.ma.masked, "expected a finite float, found nan"),
    ("0.5", "expected a float, found str"),
    (None, "expected a float, found NoneType"),
    (np.float32("inf"), "expected a finite float, found inf"),
    (Decimal("sNaN"), "expected a finite float, found Decimal('sNaN')"),
    (10**400, "expected a finite float, found a number that is too large for a float"),
    (Fraction(10**400), "expected a finite float, found a number that is too large for a float"),
]


@pytest.mark.parametrize(("value", "number"), NUMBERS, ids=repr)
def test_numbers_of_every_library_are_rewards(value, number):
    assert compute_value(lambda: value, None, "") == (number, None)
    assert parse_step({"reward": value}, role="tool")["reward"] == number


@pytest.mark.parametrize(("value", "reason"), NO_NUMBERS, ids=repr)
def test_other_values_are_refused_with_their_type_and_its_module(value, reason):
    assert compute_value(lambda: value, None, "") == (None, reason)
    with pytest.raises(NoStep, match="the reward must be a finite number"):
        parse_step({"reward": [value] if value is None else value}, role="tool")


@pytest.mark.parametrize("values", [np.array([1.0, 0.5]), torch.tensor([1.0, 0.5]), [np.bool_(True), Decimal("0.5")]])
def test_arrays_are_lists_of_rewards(values):
    assert compute_value(lambda: values, 2, "steps") == ([1.0, 0.5], None)


def test_a_single_number_is_refused_as_a_list_of_rewards():
    reason = "expected 2 floats, one for each of the steps, found torch.Tensor of shape ()"
    assert compute_value(lambda: torch.tensor(1.0), 2, "steps") == (None, reason)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.array([[1, 2]]), "[[1, 2]]"),
        (torch.tensor([0.5]), "[0.5]"),
        ({"mean": np.float32(0.5), np.int64(7): (Decimal("1.50"), Decimal("2"))}, '{"mean": 0.5, "7": [1.5, 2]}'),
        ([Fraction(1, 4), Fraction(4, 2)], "[0.25, 2]"),
        (np.array("é"), '"é"'),
    ],
    ids=repr,
)
def test_numbers_and_arrays_in_results_of_tools_become_json(result, text):
    assert json.dumps(to_json_value(result), ensure_ascii=False) == text


def test_a_result_that_is_no_json_is_named_with_its_module():
    def find() -> object:
        return [object(), Fraction]

    with pytest.raises(NoStep, match="a text or a JSON value, but it returned object"):
        ToolBox([find]).step(EpisodeTurn("", (ToolCall("find", {}),), 0))


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ("page \ud83d", "page \ufffd"),
        ("\udc00page\ud83d.", "\ufffdpage\ufffd."),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ufeffbyte order \ud83d", "\ufeffbyte order \ufffd"),
        ("page é", "page é"),
    ],
    ids=ascii,
)
def test_halves_of_characters_become_replacement_characters(text, repaired):
    assert repair_text(text) == repaired
    assert parse_step({"messages": [{"role": "tool", "name": text, "content": text}]}, role="tool")["messages"] == [
        {"role": "tool", "name": repaired, "content": repaired}
    ]


@pytest.mark.parametrize(
    ("escaped", "text"), [(r"\ud83d!", "\ufffd!"), (r"\uD83D\uDE00", "\U0001f600"), (r"\\ud83d", r"\ud83d")]
)
def test_halves_of_characters_in_the_answer_of_an_endpoint_become_replacement_characters(escaped, text):
    body = f'{{"choices": [{{"message": {{"content": "page {escaped}"}}, "finish_reason": "stop"}}]}}'
    assert read_answer(body.encode(), None).text == f"page {text}"


@pytest.mark.parametrize("character", ["a", "\U0001f600"])
def test_texts_that_are_too_large_to_send_lose_their_middle(character):
    text = "start" + character * (1 << 24) + "end"
    [message] = shorten_step(parse_step(text, role="tool"))["messages"]
    assert message["content"].startswith("start" + character)
    assert message["content"].endswith(character + "end")
    assert len(json.dumps(message)) < 1 << 24
