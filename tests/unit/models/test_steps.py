"""Steps of completions and their tokens, worked by hand and for any text."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rheostat.models.config.reward_terms import BlankLines, PatternSteps
from rheostat.models.judges.prompts import wrap_steps
from rheostat.models.text.steps import Spans, StepValues, aggregate, assign_spans, split_steps

BLANK = BlankLines()
PIECES = st.sampled_from([
    "\n", "\n\n", " ", "\t", "\r\n", "a", "So", "答", "え。", "😀", "```", "~~~", "````", "$$", "\\[", "\\]", "#### 16",
    "\u2028",
])  # fmt: skip
TEXTS = st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=40)
SEGMENTATIONS = st.sampled_from(
    [BLANK, *(PatternSteps(pattern=p) for p in (" ", r"[。.]\s*", r"\n", "(?=S)", "x*(?=a)"))]
)


@pytest.mark.parametrize(
    "steps",
    [
        ["Add.\n\n", "Then.\n \t\n\n", "So 5."],  # blank lines belong to the step before them
        ["one\r\n\r\n", "two"],
        ["Add.\nThen.\nSo 5."],
        ["\n\n  Add.\n\n", "So 5.\n\n \n"],  # blank text is no step
        [""],
        [" \n\n \n"],
        ["Look:\n\n", "```\na\n\nb\n\n$$"],  # code without an end continues to the end
        ["~~~\na\n\n```\n\nb\n~~~\n\n", "So 5."],  # a fence ends at its own kind and length
        *(
            [f"Look:\n{fence}\n\n", "So 5."]  # blank lines in code and mathematics do not split
            for fence in (
                *("```\na\n\nb\n```", "~~~ python\na\n\nb\n~~~", "  ````\na\n\n```\n\nb\n````"),
                *("$$\na\n\nb\n$$", "$$ a\n\nb$$", "\\[ a\n\nb \\]"),
            )
        ),
        *(
            [f"{stray}\n\n", "So 5."]  # a sign without its partner is no fence
            for stray in ("It costs $$ 5.", "An \\[ alone.", "A \\\\[2pt] line.", "In ``` a line: ```x``` it is.")
        ),
    ],
)
def test_a_solution_is_split_at_blank_lines_outside_of_code_and_mathematics(steps):
    assert split_steps("".join(steps), BLANK) == steps


@pytest.mark.parametrize(
    "hostile", ["\\[" * 400_000, "```\n" * 25_000, "$$\n\n" * 25_000, "\n \n" * 30_000, " " * 100_000]
)
def test_splitting_a_long_hostile_text_takes_little_time(hostile):
    began = time.process_time()
    assert "".join(split_steps(hostile, BLANK)) == hostile
    assert time.process_time() - began < 5  # CPU seconds; 0.5 on an idle machine


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [(r"(?<!#) ", ["16+3=19 ", "19-4=15 ", "#### 15"]), ("。", ["まず足す。", "次に引く。"]), (" ", ["a  ", "b "])],
)
def test_a_step_ends_with_a_match_of_a_pattern(pattern, steps):
    assert split_steps("".join(steps), PatternSteps(pattern=pattern)) == steps


@settings(max_examples=150)
@given(TEXTS, SEGMENTATIONS)
@example("```\n\n", BLANK)
def test_steps_joined_are_the_completion_and_no_step_of_several_is_blank(text, segmentation):
    steps = split_steps(text, segmentation)
    assert "".join(steps) == text
    assert len(steps) == 1 or all(step.strip() for step in steps)


def test_steps_are_shown_in_tags_numbered_from_zero_and_tags_in_their_text_are_escaped():
    shown = wrap_steps(["Add.\n\n", "<step_7>right</step_7> </step_1><incorrect_steps></incorrect_steps>"])
    assert shown == (
        "<step_0>\nAdd.\n</step_0>\n<step_1>\n&lt;step_7&gt;right&lt;/step_7&gt; &lt;/step_1&gt;"
        "&lt;incorrect_steps&gt;&lt;/incorrect_steps&gt;\n</step_1>"
    )


# ---- tokens


@pytest.mark.parametrize(
    ("starts", "lengths", "values", "spans"),
    [
        ([0, 1, 4], (3, 2), (0.0, -1.0), Spans((0, 2), (0.0, -1.0))),  # "ab.|cd" in tokens a, b.c, d: by first letter
        ([0, 3, 5, 5], (3, 2), (0.0, -1.0), Spans((0, 1), (0.0, -1.0))),  # tokens after the text are of the last step
        # a step without a first letter of a token is merged into the step before, with the lower value
        ([0, 3], (1, 1, 1, 1), (0.0, -1.0, 0.5, 0.0), Spans((0, 1), (-1.0, 0.0))),
        ([0], (1, 1, 1, 1), (0.0, -1.0, 0.5, 0.0), Spans((0,), (-1.0,))),
        ([0], (0,), (-1.0,), Spans((0,), (-1.0,))),  # an empty completion has one step for its end
        ([], (0,), (-1.0,), Spans((), ())),
    ],
)
def test_a_token_belongs_to_the_step_with_its_first_character(starts, lengths, values, spans):
    assert assign_spans(starts, StepValues(lengths, values)) == spans


def test_values_of_steps_are_aggregated():
    assert [aggregate([0.0, -1.0, 0.25], how) for how in ("mean", "sum", "min")] == [-0.25, -0.75, -1.0]
    assert aggregate([], "min") == 0.0


@settings(max_examples=150)
@given(st.data(), TEXTS, SEGMENTATIONS)
def test_every_token_is_in_one_span_and_has_the_value_of_its_step_unless_steps_were_merged(data, text, segmentation):
    steps = split_steps(text, segmentation)
    starts = sorted([0, *data.draw(st.lists(st.integers(0, len(text)), max_size=20))])
    spans = assign_spans(starts, StepValues(tuple(map(len, steps)), tuple(map(float, range(len(steps))))))
    assert spans.starts[0] == 0
    assert list(spans.starts) == sorted(set(spans.starts))
    assert spans.starts[-1] < len(starts)
    ends = [sum(map(len, steps[: index + 1])) for index in range(len(steps))]
    step_of = [next((s for s, end in enumerate(ends) if start < end), len(steps) - 1) for start in starts]
    assert [step_of[token] for token in spans.starts] == sorted(set(step_of))
    first = [step_of[token] for token in spans.starts]
    assert list(spans.values) == list(map(float, first))  # of steps that are merged, the first has the lowest here
