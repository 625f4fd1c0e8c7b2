"""Character index at which each token of a completion starts, computed with the policy's own tokenizer. Torch-free.

A character may need several tokens (byte-level BPE, byte fallback), and a token may contain parts of several
characters.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rheostat.infra.errors import Damaged

LONGEST_SEARCHED: Final = 1024
"""Maximum number of tokens of a completion for which token starts are found by a slow search. The search is needed if
the bytes of a completion are not valid text."""


def open_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json file. Raises Damaged if it cannot be loaded."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no more specific exception
        raise Damaged(
            f"{path}: the stored tokenizer of the policy cannot be loaded: {error}. Restore the file from a copy of "
            "the run"
        ) from error


def find_token_starts(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int] | None:
    """Return the character index in the completion's text at which each token starts, or None if the tokens do not
    decode to this text or are too many for the slow search.

    A token that completes a character starts after that character, unless the token contains nothing else. Special
    tokens, which are not part of the text, and EOS start at the next character of the text. The slow search is needed
    if the bytes are not valid text, and is done for up to `LONGEST_SEARCHED` tokens.
    """
    if tokenizer.decode(list(tokens), skip_special_tokens=True) != text:
        return None
    starts = _decode_stream(tokenizer, tokens, text)
    return starts or (_starts_from_prefixes(tokenizer, tokens, text) if len(tokens) <= LONGEST_SEARCHED else None)


def _decode_stream(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Return the character index in the text at which each token starts, found by decoding token by token. Returns an
    empty list if the decoded pieces together differ from the text decoded at once.

    This happens if bytes are not valid characters, because byte fallback then also omits adjacent characters.
    """
    stream = DecodeStream(skip_special_tokens=True)
    starts: list[int] = []
    pending: list[int] = []
    at = 0
    for token in tokens:
        pending.append(token)
        try:
            piece = stream.step(tokenizer, token)
        except Exception:  # "invalid prefix"; the library raises no more specific exception
            return []
        if piece is not None:
            if not text.startswith(piece, at):
                return []
            starts += _find_starts_in_piece(tokenizer, pending, piece, at)
            pending, at = [], at + len(piece)
    return starts + _find_starts_in_piece(tokenizer, pending, text[at:], at)


def _starts_from_prefixes(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Return the character index in the text at which each token starts, found by decoding each prefix of the tokens.
    The time is quadratic in the number of tokens."""
    prefixes = (tokenizer.decode(list(tokens[:count]), skip_special_tokens=True) for count in range(len(tokens)))
    return list(accumulate((_count_common_characters(prefix, text) for prefix in prefixes), max))


def split_tokens(starts: Sequence[int], text: str) -> tuple[str, ...]:
    """Split a text into the text of each token, given the character indices at which the tokens start. A character made
    of several tokens belongs to the last of these tokens."""
    return tuple(text[begin:end] for begin, end in pairwise((*starts, len(text))))


def _find_starts_in_piece(tokenizer: Tokenizer, tokens: Sequence[int], piece: str, at: int) -> list[int]:
    """Return the character indices at which tokens start that together decode to `piece`. The piece starts at index
    `at` of the text. Each token starts after the characters that the tokens before it complete."""
    if len(tokens) < 2:
        return [at] * len(tokens)
    prefixes = (tokenizer.decode(list(tokens[:count]), skip_special_tokens=True) for count in range(1, len(tokens)))
    return [at, *(at + _count_common_characters(text, piece) for text in prefixes)]


def _count_common_characters(first: str, second: str) -> int:
    """Return the length of the longest common prefix of two texts, in characters."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
