"""Offsets of tokens in their text, with real tokenizers: byte-level BPE, byte fallback, special tokens."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rheostat.infra.errors import Damaged
from rheostat.models.text.token_offsets import find_token_starts, open_tokenizer, split_tokens

EOS = "<|eos|>"
CORPUS = ["まず足す。次に引く。 So 16+3=19 #### 16", "an apple — 字 字 😀 Step one.\n\nStep two."] * 4


@cache
def build_byte_level_tokenizer() -> Tokenizer:
    """Build a tokenizer like those of GPT and Qwen: a CJK character has up to three tokens, a token parts of two."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def build_byte_fallback_tokenizer() -> Tokenizer:
    """Build a tokenizer like those of Llama 2 and Mistral: unknown text is encoded in bytes."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdSopten.=+1639#", "\n", "字", "▁a"]
    vocabulary = {token: index for index, token in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(EOS, special=True)])
    return tokenizer


def find_starts(tokenizer: Tokenizer, tokens: list[int]) -> tuple[str, list[int]]:
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    found = find_token_starts(tokenizer, tokens, text)
    assert found is not None, (tokens, text)
    assert len(found) == len(tokens)
    assert found == sorted(found)
    assert all(0 <= start <= len(text) for start in found)
    assert "".join(split_tokens(found, text)) == text
    return text, found


def split_bytes(text: str) -> list[str]:
    """Return a letter of byte-level BPE for each byte."""
    return list(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0])


@pytest.mark.parametrize(
    ("letters", "text", "expected"),
    [
        ([*"abc"], "abc", [0, 1, 2]),
        (split_bytes("a字b"), "a字b", [0, 1, 1, 1, 2]),  # all bytes of a character have its offset
        (split_bytes("a字")[:-1], "a\N{REPLACEMENT CHARACTER}", [0, 1, 2]),  # a character without its last byte
        (["a", EOS, "b", EOS], "ab", [0, 1, 1, 2]),  # special tokens have the offset of the text after them
        ([EOS], "", [0]),
    ],
)
def test_byte_level_tokens_have_the_offsets_of_their_characters(letters, text, expected):
    tokenizer = build_byte_level_tokenizer()
    assert find_starts(tokenizer, [tokenizer.token_to_id(letter) for letter in letters]) == (text, expected)


def test_a_token_that_begins_with_the_rest_of_a_character_has_the_offset_of_that_character():
    tokenizer = Tokenizer(models.BPE(vocab={"Ġå": 0, "ŃĹ": 1, "Ġ": 2, "å": 3, "Ń": 4, "Ĺ": 5}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert find_starts(tokenizer, [0, 1, 3, 4, 5]) == (" 字字", [0, 1, 2, 2, 2])  # the space is a separate character


def test_byte_fallback_tokens_have_the_offset_of_the_character_that_they_encode():
    tokenizer = build_byte_fallback_tokenizer()
    tokens = [*tokenizer.encode("a 引 字", add_special_tokens=False).ids, tokenizer.token_to_id(EOS)]
    letters = [tokenizer.id_to_token(token) for token in tokens]
    assert letters == ["▁a", "▁", "<0xE5>", "<0xBC>", "<0x95>", "▁", "字", EOS]
    assert find_starts(tokenizer, tokens) == ("a 引 字", [0, 1, 2, 2, 2, 3, 4, 5])


@settings(max_examples=100)
@given(st.text(max_size=30) | st.sampled_from(CORPUS))
@pytest.mark.parametrize("kind", [build_byte_level_tokenizer, build_byte_fallback_tokenizer])
def test_tokens_of_any_text_begin_at_the_end_of_the_decoded_tokens_before_them(kind, text):
    tokenizer = kind()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    decoded, found = find_starts(tokenizer, tokens)
    for index, start in enumerate(found):
        before = tokenizer.decode(tokens[:index], skip_special_tokens=True)
        if decoded.startswith(before):  # otherwise the prefix ends in the middle of a character
            assert start == len(before)


@settings(max_examples=150)
@given(st.data())
@pytest.mark.parametrize("kind", [build_byte_level_tokenizer, build_byte_fallback_tokenizer])
def test_offsets_of_any_sampled_tokens_cover_the_text(kind, data):
    tokenizer = kind()
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    find_starts(tokenizer, tokens)


def test_tokens_of_another_text_have_no_offsets():
    tokenizer = build_byte_level_tokenizer()
    tokens = tokenizer.encode("So 16").ids
    assert find_token_starts(tokenizer, tokens, "So 17") is None
    assert find_token_starts(tokenizer, tokens, "So 16\n") is None


def test_a_tokenizer_that_does_not_load_is_damaged(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Damaged, match=r"tokenizer\.json"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_a_saved_tokenizer_gives_the_same_offsets(tmp_path: Path):
    build_byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokens = build_byte_level_tokenizer().encode(CORPUS[0]).ids
    reopened = open_tokenizer(tmp_path / "tokenizer.json")
    assert find_token_starts(reopened, tokens, CORPUS[0]) == find_starts(build_byte_level_tokenizer(), tokens)[1]
