"""IFEval's 25 kinds of verifiable instructions, on texts that follow them and on texts that do not."""

import json

import pytest
from pydantic import TypeAdapter

from rheostat.models.config.data import FileData
from rheostat.models.config.text_rewards import IfevalReward
from rheostat.models.data.files import read_problems
from rheostat.models.rewards.ifeval import RLVR_FUNCTIONS
from rheostat.models.rewards.instructions import INSTRUCTIONS, count_sentences
from rheostat.models.rewards.rules import build_reward

CASES = {
    "keywords:existence": ({"keywords": ["sun", "Moon"]}, ["The moon and the sunset"], ["The moon"]),
    "keywords:frequency": (
        {"keyword": "ha", "frequency": 3, "relation": "at least"},
        ["ha Ha hahaha"],
        ["ha ha", "a h"],
    ),
    "keywords:forbidden_words": ({"forbidden_words": ["cat", "c++"]}, ["category"], ["A Cat.", "the cat"]),
    "keywords:letter_frequency": (
        {"letter": "E", "let_frequency": 2, "let_relation": "less than"},
        ["one", "xyz"],
        ["Eel", "these"],
    ),
    "language:response_language": (
        {"language": "de"},
        ["Das Wetter in den Bergen ändert sich schnell."],
        ["The weather changes quickly in the mountains.", "123"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"},
        ["Dr. Who paid 3.50 dollars. Fine!"],
        ["One. Two? Three!"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["a ***\nb", "***\na *** b***"],
        ["a", "a *** *** b", "a\n\nb"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "at least"},
        ["one, two; three!", "well-known fact"],
        ["one two"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        ["First.\n\n'then, it", "a\n\nTHEN"],
        ["Then\n\nfirst", "a\n\nthen\n\nb", "a\n\nthenceforth"],
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[a] and [b]"], ["[a]", "a b"]),
    "detectable_content:postscript": (
        {"postscript_marker": "P.S."},
        ["Bye. P.S. Call me", "p. s. x"],
        ["PS call", "P.S"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "* a\n**b**\n- c"],
        ["* a", "* a\n* b\n- c", "1. a\n2. b"],
    ),
    "detectable_format:constrained_response": ({}, ["I say: My answer is no."], ["no", "my answer is no."]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*a* and *b*", "*a* and **b**"],
        ["*a*", "* * * *"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "SECTION 1 SECTION 2", "Section one, Section two"],
    ),
    "detectable_format:json_format": ({}, ['{"a": 1}', "```json\n[1]\n```"], ["{a: 1}", 'Here: {"a": 1}']),
    "detectable_format:title": ({}, ["<<A poem>>\ntext"], ["<< >>", "<A poem>", "<<a\nb>>"]),
    "combination:two_responses": ({}, ["a\n******\nb"], ["a", "a******a", "a******b******c"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Why?"}, [" why? Because."], ["Because. Why?"]),
    "startend:end_checker": ({"end_phrase": "The end."}, ["It is over. the END.", '"The end." '], ["The end. Bye"]),
    "startend:quotation": ({}, [' "a b" '], ["a", '"a', '"']),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and I"],
        ["NASA and Esa"],
    ),
    "change_case:english_capital": (
        {},
        ["THE WEATHER CHANGES QUICKLY."],
        ["The weather changes.", "DAS WETTER IST GUT."],
    ),
    "change_case:english_lowercase": (
        {},
        ["the weather changes quickly."],
        ["The weather changes.", "das wetter ist gut."],
    ),
    "punctuation:no_comma": ({}, ["a; b"], ["a, b"]),
}
"""Arguments, texts that follow the instruction, and texts that do not, by the name of the instruction."""


def score(completion: str, document: object, **settings: str) -> float:
    reward = build_reward(TypeAdapter(IfevalReward).validate_python({"kind": "ifeval", **settings}))
    return reward("", completion, json.dumps(document))


def one(name: str, arguments: dict[str, object]) -> dict[str, object]:
    return {"instruction_id_list": [name], "kwargs": [arguments]}


def test_every_instruction_has_cases():
    assert set(CASES) == set(INSTRUCTIONS)
    assert {name for name, _, _ in RLVR_FUNCTIONS.values()} == set(INSTRUCTIONS)
    assert len(INSTRUCTIONS) == 25


@pytest.mark.parametrize("name", CASES)
def test_texts_that_follow_an_instruction_get_1_and_other_texts_get_0(name):
    arguments, follow, break_it = CASES[name]
    assert [text for text in follow if score(text, one(name, arguments)) != 1] == []
    assert [text for text in [*break_it, "", " \n"] if score(text, one(name, arguments)) != 0] == []


@pytest.mark.parametrize(
    ("relation", "counts"),
    [("less than", [9]), ("at least", [10, 11, 12]), ("at most", [9, 10]), ("exactly", [10]), ("around", [9, 10, 11])],
)
def test_a_count_is_compared_by_the_relation(relation, counts):
    wanted = one("length_constraints:number_words", {"num_words": 10, "relation": relation})
    assert [count for count in (8, 9, 10, 11, 12) if score("w " * count, wanted)] == (
        [8, *counts] if relation in ("less than", "at most") else counts
    )


def test_the_score_is_the_share_of_instructions_or_1_for_all():
    document = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation", "detectable_format:title"],
        "kwargs": [{}, None, {"num_words": None}],
    }
    assert score("<<a>> b", document) == pytest.approx(2 / 3)
    assert score("<<a>> b", document, score="all") == 0
    assert score('"<<a>> b"', document, score="all") == 1


def test_loose_responses_may_have_an_introduction_and_asterisks():
    quoted = one("startend:quotation", {})
    text = 'Here it is:\n*"a b"*\nEnjoy'
    assert score(text, quoted) == 0
    assert score(text, quoted, responses="loose") == 1


@pytest.mark.parametrize(
    ("document", "follow", "break_it"),
    [
        ({"func_name": "verify_keyword_frequency", "word": "ha", "N": 2}, "ha ha", "ha ha ha"),
        ({"func_name": "validate_word_constraint", "N": 2, "quantifier": "at most"}, "one", "one two three"),
        ({"func_name": "validate_sections", "N": 1, "section_splitter": "Part", "i": None}, "Part 1", "Part"),
        ({"func_name": "validate_choice", "options": "('red', 'blue')"}, "so blue", "green"),
        ({"func_name": "validate_choice", "options": "red/blue"}, "red", "re"),
        ({"func_name": "validate_paragraphs", "N": 1, "i": 1, "first_word": "so"}, "So it is", "It is"),
        ([{"instruction_id": ["punctuation:no_comma"], "kwargs": [None]}], "a", "a,"),
    ],
)
def test_the_forms_of_other_data_sets_are_read(document, follow, break_it):
    assert (score(follow, document), score(break_it, document)) == (1, 0)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0),
        ("No end", 1),
        ("Mr. A. Smith, e.g. of Acme Inc. agrees. Done", 2),
        ("It costs .5 dollars or 3.75 euros.", 1),
        ('"Stop!" he said. Why...? Who knows…', 4),
        ("是的。不是！", 2),
        ("***", 0),
    ],
)
def test_sentences_are_counted_without_abbreviations(text, sentences):
    assert count_sentences(text) == sentences


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("no instructions", "answer_columns"),
        (one("punctuation:no_coma", {}), "'punctuation:no_coma' is not an instruction.*'punctuation:no_comma'"),
        (one("keywords:existence", {}), "'keywords', which is missing"),
        (one("keywords:existence", {"keywords": []}), None),
        (one("keywords:existence", {"keywords": [1]}), "must be a list of texts"),
        (one("punctuation:no_comma", {"n": 1}), "has no argument 'n'"),
        (one("length_constraints:number_words", {"num_words": "3", "relation": "at least"}), "must be of type int"),
        (one("length_constraints:number_words", {"num_words": 3, "relation": "over"}), "must be one of less than"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, '"kwargs" must be a list'),
        ({"instruction_id_list": [], "kwargs": []}, '"instruction_id_list" must be a list'),
        ({"func_name": "validate_no_comas"}, "not a function of RLVR-IFeval.*'validate_no_commas'"),
    ],
)
def test_invalid_instructions_are_refused(document, message):
    if message is None:
        assert score("a", document) == 1
        return
    with pytest.raises(ValueError, match=message):
        score("a", document)


def test_whole_numbers_of_tables_may_be_floats():
    assert score("a b", one("length_constraints:number_words", {"num_words": 2.0, "relation": "at least"})) == 1


def test_two_columns_form_the_answer(tmp_path):
    path = tmp_path / "ifeval.jsonl"
    path.write_text(json.dumps({"prompt": "a", "instruction_id_list": ["startend:quotation"], "kwargs": [{"n": None}]}))
    [problem] = read_problems(path, FileData(path=path, answer_columns=("instruction_id_list", "kwargs")))
    assert json.loads(problem.answer) == {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
