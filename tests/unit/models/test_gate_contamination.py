"""Held-out problems among those trained on: by hand, and against a search of every pair."""

import random

from models.gate.contamination import Contamination, contamination

TWENTY = " ".join(f"w{n}" for n in range(20))
"""Eight n-grams of 13 words."""


def test_a_prompt_that_is_trained_on_word_for_word_is_counted_once_as_exact():
    found = contamination({"a": TWENTY, "b": "What is 3 + 4?"}, [TWENTY, TWENTY, "What is 3 - 4?"])
    assert found == Contamination(prompts=2, exact=1, near=0, examples=("a",))
    assert found.share == 0.5


def test_a_prompt_that_an_earlier_run_trained_on_is_counted_by_its_id_where_the_text_is_gone():
    found = contamination({"a": TWENTY, "b": "What is 3 + 4?", "c": "Why?"}, ["Why?"], before=frozenset("bcx"))
    assert found == Contamination(prompts=3, exact=2, near=0, examples=("b", "c"))


def test_a_prompt_is_near_from_that_share_of_its_n_grams_on():
    """Without its last word seven of eight n-grams occur, without its last two six: 0.875 and 0.75."""
    words = TWENTY.split()
    for cut, near in ((1, 1), (2, 0)):
        found = contamination({"a": TWENTY}, ["So: " + " ".join(words[:-cut]) + " and so on"])
        assert (found.exact, found.near) == (0, near)
    assert contamination({"a": TWENTY}, [" ".join(words[:-2])], near=0.75).near == 1


def test_n_grams_may_come_from_several_training_prompts():
    words = TWENTY.split()
    assert contamination({"a": TWENTY}, [" ".join(words[:16]), " ".join(words[4:])]).near == 1


def test_case_and_white_space_hide_nothing_and_short_prompts_are_compared_whole():
    heldout = {"long": TWENTY, "short": "What is 3 + 4?"}
    assert contamination(heldout, [TWENTY.upper().replace(" ", "\n"), "what  is 3 + 4?"]).near == 2
    assert contamination(heldout, ["Now tell me: What is 3 + 4?", "What is 3 + 4 ?"]).share == 0


def test_a_template_that_held_out_prompts_share_makes_none_of_them_trained_on():
    template = " ".join(f"rule{n}" for n in range(60))
    heldout = {f"p{n}": f"{template} What is {n} + {n}?" for n in range(10)}
    assert contamination(heldout, [f"{template} What is 77 + 1?"]).share == 0
    again = contamination(heldout, [f"{template}  What is 3 + 3?"])
    assert (again.near, again.examples) == (1, ("p3",))
    assert contamination(dict.fromkeys("abcdefghij", TWENTY), ["Something else."]).share == 0


def test_the_first_few_are_named_in_their_order():
    heldout = {f"p{n}": f"{TWENTY} {n} {n} {n}" for n in range(9)}
    found = contamination(heldout, reversed(heldout.values()))
    assert (found.exact, found.examples) == (9, ("p0", "p1", "p2", "p3", "p4"))
    assert contamination({}, [TWENTY]).share == 0


def brute_force(heldout, training, words, near):
    """Look for each run of words in each training prompt."""

    def runs(text):
        parts = text.split()
        return {tuple(parts[at : at + words]) for at in range(len(parts) - words + 1)} or {tuple(parts)}

    exact = {name for name, text in heldout.items() if any(text == other for other in training)}
    share = {}
    for name, text in heldout.items():
        told = [run for run in runs(text) if sum(run in runs(other) for other in heldout.values()) < 10]
        seen = [run for run in told if any(run in runs(other) for other in training)]
        share[name] = len(seen) / len(told) if told else 0
    return exact, {name for name in heldout if name not in exact and share[name] >= near}


def test_counts_are_those_of_a_search_of_every_pair():
    rng = random.Random(4)
    counts = []
    for _ in range(40):
        texts = [" ".join(rng.choices("abc", k=rng.randint(2, 12))) for _ in range(60)]
        heldout, training = {f"p{n}": text for n, text in enumerate(texts[:20])}, texts[18:]
        exact, close = brute_force(heldout, training, 4, 0.6)
        found = contamination(heldout, iter(training), words=4, near=0.6)
        assert (found.exact, found.near) == (len(exact), len(close))
        assert found.examples == tuple(name for name in heldout if name in exact | close)[:5]
        counts.append(len(close))
    assert min(counts) < max(counts) > 3
