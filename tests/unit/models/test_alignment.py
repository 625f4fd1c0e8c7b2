"""Alignment of two tokenizations of the same completion."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.experimental.gold.gold_trainer import ULDLoss

from rheostat.infra.errors import BadInput
from rheostat.models.text.alignment import align_completion, build_byte_decoder, find_spans, spread_differences
from rheostat.models.text.tokenizer import train_tokenizer

TEXTS = ["the cat sat on the mat", "où est le café ? ☕☕", "12 + 34 = 46"]


def small_tokenizer(vocab_size: int, texts=TEXTS) -> PreTrainedTokenizerFast:
    return train_tokenizer(texts, vocab_size=vocab_size, context=64)


FINE, COARSE = small_tokenizer(262), small_tokenizer(330)


def sentence_pieces(merges: list[tuple[str, str]], *, prepends: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer like those of SentencePiece: spaces are written as ▁, and unknown characters as bytes. With
    `prepends`, a space is put before every text, also before one that begins with a space."""
    characters = sorted({*"▁abcdehnostu"})
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *characters, *map("".join, merges)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if prepends:
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def align(completion, policy, teacher, *, ends=frozenset(), teacher_end=None, max_tokens=1000):
    return align_completion(
        completion,
        policy_bytes=build_byte_decoder(policy, where="the policy"),
        teacher_bytes=build_byte_decoder(teacher, where="the teacher"),
        teacher=teacher,
        ends=ends,
        teacher_end=teacher.eos_token_id if teacher_end is None else teacher_end,
        max_tokens=max_tokens,
    )


def ranges(spans) -> list[tuple[int, int, int, int]]:
    return [(own.start, own.stop, theirs.start, theirs.stop) for own, theirs in spans]


def test_spans_end_where_tokens_of_both_end():
    spans = find_spans([b"ab", b"c", b"d", b"ef"], [b"a", b"bc", b"de", b"f"])
    assert ranges(spans) == [(0, 2, 0, 2), (2, 4, 2, 4)]


def test_spans_end_at_the_first_difference_of_the_texts():
    assert ranges(find_spans([b"ab", b"c", b"d"], [b"a", b"b", b"x", b"d"])) == [(0, 1, 0, 2)]
    assert find_spans([b"x"], [b"y"]) == ()
    assert find_spans([], []) == ()


def test_the_signal_of_a_span_is_divided_among_its_tokens():
    policy = np.array([-1.0, -2.0, -4.0, -0.5], np.float32)
    teacher = np.array([-0.5, -0.25, -7.0], np.float32)
    spans = find_spans([b"a", b"b", b"c", b"d"], [b"a", b"bc", b"e"])
    aligned = spread_differences(policy, teacher, spans)
    # The first span is one token each: -0.5. The second has -0.25 - (-6) = 5.75 for two tokens. d has no signal.
    np.testing.assert_array_equal(aligned, np.array([-0.5, -2 + 2.875, -4 + 2.875, -0.5], np.float32))


pieces = st.lists(st.binary(min_size=1, max_size=4), max_size=12)


@given(text=pieces, cuts=st.sets(st.integers(1, 40)), seed=st.integers(0, 99))
def test_the_sum_of_the_signal_is_the_log_ratio_of_the_text(text, cuts, seed):
    data = b"".join(text)
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    other = [data[begin:end] for begin, end in pairwise(places) if end > begin]
    rng = np.random.default_rng(seed)
    policy, teacher = (-rng.exponential(2, len(tokens)).astype(np.float32) for tokens in (text, other))
    spans = find_spans(text, other)
    signal = spread_differences(policy, teacher, spans).astype(np.float64) - policy
    assert signal.sum() == pytest.approx(float(teacher.sum()) - float(policy.sum()), abs=1e-4)
    ends = [[*np.cumsum([0, *map(len, tokens)])] for tokens in (text, other)]
    for own, theirs in spans:
        assert b"".join(text[own]) == b"".join(other[theirs])
        inside = {*ends[0][own.start + 1 : own.stop]} & {*ends[1][theirs.start + 1 : theirs.stop]}
        assert not inside
        expected = float(teacher[theirs].sum()) - float(policy[own].sum())
        assert signal[own].sum() == pytest.approx(expected, abs=1e-4)


@given(text=pieces, cuts=st.sets(st.integers(1, 40)))
def test_spans_are_the_groups_of_gold(text, cuts):
    data = b"".join(text)
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    other = [data[begin:end] for begin, end in pairwise(places) if end > begin]
    offsets = [[*pairwise([0, *np.cumsum([*map(len, tokens)]).tolist()])] for tokens in (text, other)]
    groups = ULDLoss._align_by_byte_offsets(*offsets)
    found = find_spans(text, other)
    assert [[*range(own.start, own.stop)] for own, _ in found] == groups[0]
    assert [[*range(theirs.start, theirs.stop)] for _, theirs in found] == groups[1]


@given(text=st.text(max_size=30))
def test_every_text_is_aligned_as_a_whole_with_another_byte_level_tokenizer(text):
    completion = FINE(text).input_ids
    aligned = align(completion, FINE, COARSE)
    assert aligned.tokens == COARSE(text, split_special_tokens=True).input_ids
    assert sum(own.stop - own.start for own, _ in aligned.spans) == len(completion)
    assert sum(theirs.stop - theirs.start for _, theirs in aligned.spans) == len(aligned.tokens)


def test_with_equal_tokenizers_every_token_is_a_span_with_the_teachers_log_prob():
    completion = [*COARSE("the café is on the mat").input_ids, COARSE.eos_token_id]
    aligned = align(completion, COARSE, COARSE, ends=frozenset({COARSE.eos_token_id}))
    assert aligned.tokens == completion
    assert ranges(aligned.spans) == [(place, place + 1, place, place + 1) for place in range(len(completion))]
    policy, teacher = -np.random.default_rng(0).exponential(3, (2, len(completion))).astype(np.float32)
    np.testing.assert_array_equal(spread_differences(policy, teacher, aligned.spans), teacher)


def test_characters_that_are_cut_at_the_end_have_no_signal():
    completion = FINE("a ☕").input_ids[:-1]
    aligned = align(completion, FINE, COARSE)
    assert aligned.tokens == COARSE("a ").input_ids
    assert aligned.spans[-1][0].stop < len(completion)


def test_a_completion_with_a_wrong_byte_is_compared_up_to_this_byte():
    wrong = FINE("☕").input_ids[0]
    end = FINE.eos_token_id
    aligned = align([*FINE("the ").input_ids, wrong, *FINE("mat").input_ids, end], FINE, COARSE, ends=frozenset({end}))
    assert COARSE.decode(aligned.tokens) == "the "
    assert aligned.spans[-1][0].stop == len(FINE("the ").input_ids)


def test_the_end_of_a_completion_is_a_separate_span():
    teacher = sentence_pieces([("▁", "t"), ("h", "e"), ("▁t", "he")])
    completion = [*FINE("the cat").input_ids, FINE.eos_token_id]
    aligned = align(completion, FINE, teacher, ends=frozenset({FINE.eos_token_id}))
    assert aligned.tokens[-1] == teacher.eos_token_id
    count = len(completion)
    assert ranges(aligned.spans)[-1] == (count - 1, count, len(aligned.tokens) - 1, len(aligned.tokens))
    assert align(completion[:-1], FINE, teacher).tokens == aligned.tokens[:-1]


def test_spaces_and_bytes_of_sentence_pieces_are_aligned():
    teacher = sentence_pieces([("▁", "t"), ("h", "e"), ("▁t", "he")])
    completion = FINE("the tea ☕").input_ids
    aligned = align(completion, FINE, teacher)
    assert [teacher.convert_ids_to_tokens(token) for token in aligned.tokens] == [
        "▁the", "▁t", "e", "a", "▁", "<0xE2>", "<0x98>", "<0x95>",
    ]  # fmt: skip
    assert sum(own.stop - own.start for own, _ in aligned.spans) == len(completion)


@pytest.mark.parametrize("text", ["the tea", " the tea", "  the tea", " "])
@pytest.mark.parametrize("prepends", [False, True])
def test_spaces_at_the_beginning_are_aligned(text, prepends):
    teacher = sentence_pieces([("▁", "t"), ("h", "e"), ("▁t", "he")], prepends=prepends)
    completion = [*FINE(text).input_ids, FINE.eos_token_id]
    aligned = align(completion, FINE, teacher, ends=frozenset({FINE.eos_token_id}))
    assert sum(own.stop - own.start for own, _ in aligned.spans) == len(completion)


def test_added_tokens_of_sentence_pieces_are_read_as_spaces():
    teacher = sentence_pieces([("h", "e")])
    teacher.add_tokens([AddedToken("▁▁", normalized=False)])
    read = build_byte_decoder(teacher, where="the teacher")
    assert read(teacher.convert_tokens_to_ids("▁▁")) == b"  "


def test_the_end_is_compared_with_the_token_that_ends_a_turn_of_the_teacher():
    completion = [*FINE("the cat").input_ids, FINE.eos_token_id]
    aligned = align(completion, FINE, COARSE, ends=frozenset({FINE.eos_token_id}), teacher_end=7)
    assert aligned.tokens[-1] == 7


def test_the_end_has_no_signal_after_a_difference_of_the_texts():
    teacher = sentence_pieces([])
    teacher.backend_tokenizer.normalizer = normalizers.NFC()
    completion = [*FINE("the e\u0301t").input_ids, FINE.eos_token_id]
    aligned = align(completion, FINE, teacher, ends=frozenset({FINE.eos_token_id}))
    assert aligned.spans[-1][0].stop == len(FINE("the ").input_ids)


def test_a_completion_that_is_too_long_for_the_teacher_is_compared_up_to_the_cut():
    completion = [*FINE("the cat sat").input_ids, FINE.eos_token_id]
    ends = frozenset({FINE.eos_token_id})
    whole = align(completion, FINE, COARSE, ends=ends)
    cut = align(completion, FINE, COARSE, ends=ends, max_tokens=2)
    assert cut.tokens == whole.tokens[:2]
    assert cut.spans == tuple(each for each in whole.spans if each[1].stop <= 2)
    assert align(completion, FINE, COARSE, ends=ends, max_tokens=-3).tokens == []


def test_control_tokens_in_the_text_are_read_as_ordinary_text():
    completion = [FINE.pad_token_id, *FINE("mat").input_ids]
    aligned = align(completion, FINE, COARSE)
    assert COARSE.pad_token_id not in aligned.tokens
    assert aligned.spans[0][0] == slice(0, 1)


def test_a_tokenizer_of_words_is_refused():
    words = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    with pytest.raises(BadInput, match="the teacher: tokens cannot be aligned by text"):
        build_byte_decoder(tokenizer, where="the teacher")
