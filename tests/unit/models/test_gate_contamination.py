"""Held-out prompts that also occur in training prompts, against hand-made cases and an exhaustive search."""

import random

import pytest

from rheostat.models.gate.contamination import Contamination, contamination

WORDS = [f"w{n}" for n in range(20)]
TWENTY = " ".join(WORDS)
"""Text with eight n-grams of 13 words."""
SUM = "What is 3 + 4?"


@pytest.mark.parametrize(
    ("heldout", "training", "options", "exact", "near", "examples"),
    [
        ({"a": TWENTY, "b": SUM}, [TWENTY, TWENTY, "What is 3 - 4?"], {}, 1, 0, "a"),
        # the ids of prompts of earlier runs are enough
        ({"a": TWENTY, "b": SUM, "c": "Why?"}, ["Why?"], {"before": frozenset("bcx")}, 2, 0, "bc"),
        # without the last word seven of eight n-grams occur (0.875), without the last two six (0.75)
        ({"a": TWENTY}, [f"So: {' '.join(WORDS[:-1])} and so on"], {}, 0, 1, "a"),
        ({"a": TWENTY}, [f"So: {' '.join(WORDS[:-2])} and so on"], {}, 0, 0, ""),
        ({"a": TWENTY}, [" ".join(WORDS[:-2])], {"near": 0.75}, 0, 1, "a"),
        # n-grams may come from several training prompts
        ({"a": TWENTY}, [" ".join(WORDS[:16]), " ".join(WORDS[4:])], {}, 0, 1, "a"),
        # case and white space are ignored; a short prompt must match as a whole
        ({"a": TWENTY, "b": SUM}, [TWENTY.upper().replace(" ", "\n"), "what  is 3 + 4?"], {}, 0, 2, "ab"),
        ({"a": TWENTY, "b": SUM}, [f"Now tell me: {SUM}", "What is 3 + 4 ?"], {}, 0, 0, ""),
        # ten held-out prompts that share all their n-grams
        (dict.fromkeys("abcdefghij", TWENTY), ["Something else."], {}, 0, 0, ""),
        ({}, [TWENTY], {}, 0, 0, ""),
    ],
)
def test_exact_and_near_matches_are_counted_and_named(heldout, training, options, exact, near, examples):
    result = contamination(heldout, training, **options)
    assert result == Contamination(prompts=len(heldout), exact=exact, near=near, examples=tuple(examples))
    assert result.share == ((exact + near) / len(heldout) if heldout else 0)


def test_a_template_shared_by_held_out_prompts_is_not_a_match():
    template = " ".join(f"rule{n}" for n in range(60))
    heldout = {f"p{n}": f"{template} What is {n} + {n}?" for n in range(10)}
    assert contamination(heldout, [f"{template} What is 77 + 1?"]).share == 0
    repeated = contamination(heldout, [f"{template}  What is 3 + 3?"])
    assert (repeated.near, repeated.examples) == (1, ("p3",))


def test_the_first_five_matches_are_named_in_their_order():
    heldout = {f"p{n}": f"{TWENTY} {n} {n} {n}" for n in range(9)}
    result = contamination(heldout, reversed(heldout.values()))
    assert (result.exact, result.examples) == (9, ("p0", "p1", "p2", "p3", "p4"))


def list_runs(text, words):
    parts = text.split()
    return {tuple(parts[at : at + words]) for at in range(len(parts) - words + 1)} or {tuple(parts)}


def search_matches(heldout, training, words, near):
    """Search every run of words of each held-out prompt in every training prompt."""
    runs = {text: list_runs(text, words) for text in (*heldout.values(), *training)}
    exact, close = {name for name, text in heldout.items() if text in training}, set()
    for name, text in heldout.items():
        own = [run for run in runs[text] if sum(run in runs[other] for other in heldout.values()) < 10]
        matched = [run for run in own if any(run in runs[other] for other in training)]
        if name not in exact and (len(matched) / len(own) if own else 0) >= near:
            close.add(name)
    return exact, close


def test_counts_equal_those_of_an_exhaustive_search():
    rng = random.Random(4)
    counts = []
    for _ in range(40):
        texts = [" ".join(rng.choices("abc", k=rng.randint(2, 12))) for _ in range(60)]
        heldout, training = {f"p{n}": text for n, text in enumerate(texts[:20])}, texts[18:]
        exact, close = search_matches(heldout, training, 4, 0.6)
        result = contamination(heldout, iter(training), words=4, near=0.6)
        assert (result.exact, result.near) == (len(exact), len(close))
        assert result.examples == tuple(name for name in heldout if name in exact | close)[:5]
        counts.append(len(close))
    assert min(counts) < max(counts) > 3
