"""Ready-made rewards for texts against scores worked by hand, and the list of all kinds."""

import json
import tomllib

import pytest
from pydantic import TypeAdapter

from rheostat.flows.cli.rewards import rewards
from rheostat.infra.errors import BadInput
from rheostat.models.config.rewards import REWARD_CLASSES, BuiltInConfig, RewardConfig
from rheostat.models.rewards.rules import build_reward

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TEXTS = json.dumps({"type": "string"})

SCORES = [
    # exact match: white space at the ends is ignored; "squad" ignores case, punctuation and articles
    ({"kind": "exact_match"}, " Paris\n", "Paris", 1),
    ({"kind": "exact_match"}, "paris", "Paris", 0),
    ({"kind": "exact_match", "normalize": "squad"}, "the  paris.", "Paris", 1),
    ({"kind": "exact_match", "normalize": "squad"}, "Theparis", "the Paris", 0),
    ({"kind": "exact_match", "reference_separator": "|"}, "Berlin", "Paris| Berlin |", 1),
    ({"kind": "exact_match"}, "Paris", "Paris|Berlin", 0),
    # F1: 2 shared words of 4 and 3 give 4/7; a repeated word counts as often as in both texts
    ({"kind": "f1"}, "a red big old house", "the old house there", 4 / 7),
    ({"kind": "f1"}, "very very good", "very good", 4 / 5),
    ({"kind": "f1"}, "no", "yes", 0),
    ({"kind": "f1"}, "the", "an", 1),
    ({"kind": "f1"}, "", "yes", 0),
    ({"kind": "f1", "reference_separator": "|"}, "old house", "new flat|old house", 1),
    # ROUGE: 3 of 5 words and 1 of 4 pairs are shared; the longest common subsequence has 3 words
    ({"kind": "rouge", "variant": "rouge1"}, "the cat sat on mats", "the cat lay on wool", 3 / 5),
    ({"kind": "rouge", "variant": "rouge2"}, "the cat sat on mats", "the cat lay on wool", 1 / 4),
    ({"kind": "rouge"}, "on the cat", "the cat lay on", 4 / 7),
    ({"kind": "rouge", "value": "recall"}, "the cat sat on the mat", "cat mat", 1),
    ({"kind": "rouge", "value": "precision"}, "the cat sat on", "cat on", 1 / 2),
    ({"kind": "rouge", "stemming": True}, "running cats", "run cat", 1),
    ({"kind": "rouge"}, "running cats", "run cat", 0),
    # BLEU: precisions 5/6, 3/5, 2/4 and 1/3 of the sequences of 1 to 4 words
    ({"kind": "bleu"}, "the cat sat on the mat", "the cat sat on a mat", (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25),
    ({"kind": "bleu"}, "the cat sat on a mat", "the cat sat on a mat", 1),
    ({"kind": "bleu"}, "the cat", "the cat", 1),
    ({"kind": "bleu", "tokenize": "char"}, "猫坐在垫子上", "猫坐在垫子上", 1),
    ({"kind": "bleu"}, "", "the cat", 0),
    # JSON: the last code block or the whole completion, as the standard defines JSON
    ({"kind": "json_schema", "json_schema": SCHEMA}, '{"age": 3}', "", 1),
    ({"kind": "json_schema", "json_schema": SCHEMA}, '{"age": "3"}', "", 0),
    ({"kind": "json_schema", "json_schema": SCHEMA}, '{"age": 3} is the answer', "", 0),
    ({"kind": "json_schema", "json_schema": SCHEMA}, 'First:\n```\n{}\n```\n```json\n{"age": 3}\n```\nDone', "", 1),
    ({"kind": "json_schema", "json_schema": SCHEMA}, '{"age": 3, "age": 4}', "", 0),
    ({"kind": "json_schema", "json_schema": {"type": "number"}}, "NaN", "", 0),
    ({"kind": "json_schema", "json_schema": {}}, "[" * 100_000, "", 0),
    ({"kind": "json_schema"}, '"text"', TEXTS, 1),
    ({"kind": "json_schema"}, "1", TEXTS, 0),
    # length: 1 within the limits, falling by 1 / margin outside
    ({"kind": "length", "max_length": 3}, "one two three", "", 1),
    ({"kind": "length", "max_length": 3}, "one two three four", "", 0),
    ({"kind": "length", "max_length": 3, "margin": 4}, "one two three four", "", 3 / 4),
    ({"kind": "length", "max_length": 3, "margin": 4}, "w " * 20, "", 0),
    ({"kind": "length", "min_length": 10, "margin": 10, "unit": "characters"}, "abcde", "", 1 / 2),
    ({"kind": "length", "min_length": 2, "unit": "lines"}, "one\n\n", "", 0),
    ({"kind": "length", "min_length": 2, "unit": "lines"}, "one\n\ntwo", "", 1),
    # repetition: "a b a b" has the pairs ab, ba, ab
    ({"kind": "repetition", "words": 2}, "a b a b", "", 2 / 3),
    ({"kind": "repetition", "words": 1}, "a a a a", "", 1 / 4),
    ({"kind": "repetition"}, "one two", "", 1),
    # language
    ({"kind": "language", "language": "de"}, "Das Haus steht an einem kleinen Fluss.", "", 1),
    ({"kind": "language", "language": "de"}, "The house stands at a small river.", "", 0),
    ({"kind": "language"}, "La maison est au bord d'une petite rivière.", "fr", 1),
    ({"kind": "language", "language": "en"}, "1234 !?", "", 0),
]

BUILT_IN = TypeAdapter(BuiltInConfig)


@pytest.mark.parametrize(("settings", "completion", "answer", "expected"), SCORES)
def test_a_completion_gets_the_score_worked_by_hand(settings, completion, answer, expected):
    reward = build_reward(BUILT_IN.validate_python(settings))
    assert reward("", completion, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "answer", "message"),
    [
        ({"kind": "exact_match"}, " ", "reference answer of this problem is empty"),
        ({"kind": "bleu", "reference_separator": "|"}, "|", "reference answer of this problem is empty"),
        ({"kind": "json_schema"}, "{", "the answer is not a JSON schema"),
        ({"kind": "json_schema"}, "[1]", "a JSON schema must be a JSON object, found list"),
        ({"kind": "json_schema"}, '{"type": "txt"}', r"JSON schema is not valid at \$.type"),
        ({"kind": "language"}, "german", "the language 'german' is not known"),
    ],
)
def test_a_reference_that_cannot_be_compared_with_is_named(settings, answer, message):
    with pytest.raises(ValueError, match=message):
        build_reward(BUILT_IN.validate_python(settings))("", "a completion", answer)


def test_a_schema_downloads_no_address():
    reward = build_reward(
        BUILT_IN.validate_python({"kind": "json_schema", "json_schema": {"$ref": "http://127.0.0.1:1/s"}})
    )
    with pytest.raises(Exception, match="Unresolvable"):
        reward("", "{}", "")


def test_all_kinds_are_listed_with_a_valid_example(capsys):
    rewards(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in listed] == [each.model_fields["kind"].default for each in REWARD_CLASSES]
    for each in listed:
        [example] = tomllib.loads(f"rewards = [{each['example']}]")["rewards"]
        assert TypeAdapter(RewardConfig).validate_python(example).kind == each["kind"]


def test_the_list_of_kinds_can_be_limited_to_one(capsys):
    rewards("length")
    assert capsys.readouterr().out.startswith("length\n    Reward of 1 if the length of the completion")
    with pytest.raises(BadInput, match=r"'lenght' is not a kind of reward.*did you mean 'length'"):
        rewards("lenght")
