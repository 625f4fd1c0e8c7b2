"""Numbers in texts for users have their noun in the singular or plural."""

import pytest

from rheostat.infra.counts import format_count


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "image"), "0 images"),
        ((1, "image"), "1 image"),
        ((1.0, "held-out pair"), "1 held-out pair"),
        ((2, "image"), "2 images"),
        ((12000, "prompt"), "12,000 prompts"),
        ((1, "weight does", "weights do"), "1 weight does"),
        ((3, "weight does", "weights do"), "3 weights do"),
    ],
)
def test_a_count_is_formatted_with_the_singular_only_for_one(arguments, text):
    assert format_count(*arguments) == text
