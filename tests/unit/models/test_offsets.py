"""Where tokens begin in their text, with real tokenizers: byte-level BPE, byte fallback, special tokens."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from infra.errors import Damaged
from models.text.token_offsets import open_tokenizer, token_starts, token_texts

EOS = "<|eos|>"
CORPUS = ["まず足す。次に引く。 So 16+3=19 #### 16", "an apple — 字 字 😀 Step one.\n\nStep two."] * 4


@cache
def byte_level() -> Tokenizer:
    """GPT's and Qwen's kind: a character of CJK takes up to three tokens, and a token may hold parts of two."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Llama 2's and Mistral's kind: what is no token is spelt in bytes, and a first space is not shown."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdSopten.=+1639#", "\n", "字", "▁a"]
    vocabulary = {token: index for index, token in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def starts(tokenizer: Tokenizer, tokens: list[int]) -> tuple[str, list[int]]:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    found = token_starts(tokenizer, tokens, text)
    assert found is not None, (tokens, text)
    assert len(found) == len(tokens)
    assert found == sorted(found)
    assert all(0 <= start <= len(text) for start in found)
    assert "".join(token_texts(found, text)) == text
    return text, found


def test_tokens_of_whole_characters_begin_where_they_stand():
    tokenizer = byte_level()
    tokens = [tokenizer.token_to_id(letter) for letter in "abc"]
    assert starts(tokenizer, tokens) == ("abc", [0, 1, 2])


def test_all_bytes_of_a_character_begin_at_it_and_the_next_token_after_it():
    tokenizer = byte_level()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a字b")[0][0]
    tokens = [tokenizer.token_to_id(letter) for letter in letters]
    assert len(tokens) == 5
    assert starts(tokenizer, tokens) == ("a字b", [0, 1, 1, 1, 2])


def test_a_token_that_begins_with_the_rest_of_a_character_begins_at_that_character():
    tokenizer = Tokenizer(models.BPE(vocab={"Ġå": 0, "ŃĹ": 1, "Ġ": 2, "å": 3, "Ń": 4, "Ĺ": 5}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert starts(tokenizer, [0, 1, 3, 4, 5]) == (" 字字", [0, 1, 2, 2, 2])  # the space is a character of its own


def test_special_tokens_and_eos_begin_where_the_text_goes_on():
    tokenizer = byte_level()
    eos, a, b = (tokenizer.token_to_id(token) for token in (EOS, "a", "b"))
    assert starts(tokenizer, [a, eos, b, eos]) == ("ab", [0, 1, 1, 2])
    assert starts(tokenizer, [eos]) == ("", [0])


def test_byte_fallback_tokens_begin_at_the_character_that_they_spell():
    tokenizer = byte_fallback()
    tokens = [*tokenizer.encode("a 引 字", add_special_tokens=False).ids, tokenizer.token_to_id(EOS)]
    spelt = [tokenizer.id_to_token(token) for token in tokens]
    assert spelt == ["▁a", "▁", "<0xE5>", "<0xBC>", "<0x95>", "▁", "字", EOS]
    assert starts(tokenizer, tokens) == ("a 引 字", [0, 1, 2, 2, 2, 3, 4, 5])


def test_a_character_that_is_cut_short_is_the_sign_that_the_text_shows_for_it():
    tokenizer = byte_level()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("a字")[0][0]
    tokens = [tokenizer.token_to_id(letter) for letter in letters[:-1]]
    assert starts(tokenizer, tokens) == ("a\N{REPLACEMENT CHARACTER}", [0, 1, 2])


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30) | st.sampled_from(CORPUS))
@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_tokens_of_any_text_begin_where_decoding_those_before_them_ends(kind, text):
    tokenizer = kind()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    spelt, found = starts(tokenizer, tokens)
    for index, start in enumerate(found):
        before = tokenizer.decode(tokens[:index], skip_special_tokens=True)
        if spelt.startswith(before):  # otherwise it ends in the middle of a character
            assert start == len(before)


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_whatever_tokens_a_policy_draws_their_starts_cover_the_text(kind, data):
    tokenizer = kind()
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    starts(tokenizer, tokens)


def test_tokens_that_spell_another_text_have_no_place_in_it():
    tokenizer = byte_level()
    tokens = tokenizer.encode("So 16").ids
    assert token_starts(tokenizer, tokens, "So 17") is None
    assert token_starts(tokenizer, tokens, "So 16\n") is None


def test_a_tokenizer_that_does_not_load_is_damage(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Damaged, match=r"tokenizer.json: it does not load"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_a_saved_tokenizer_gives_the_same_starts(tmp_path: Path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokens = byte_level().encode(CORPUS[0]).ids
    assert (
        token_starts(open_tokenizer(tmp_path / "tokenizer.json"), tokens, CORPUS[0]) == starts(byte_level(), tokens)[1]
    )
