"""Where in its text each token of a completion begins, by the policy's own tokenizer. Torch-free.

A character may take several tokens (byte-level BPE, byte fallback), and a token may hold parts of several characters.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from infra.errors import Damaged

LONGEST_SEARCHED: Final = 1024
"""Tokens of a completion whose starts are searched for although it has bytes that are no text."""


def open_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Raises Damaged."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise Damaged(f"tokenizer {path}: it does not load: {error}") from error


def token_starts(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int] | None:
    """Return the index of each token's first character in the text; none unless the tokens spell just this text.

    A token that ends a character begins after it, unless it holds nothing else; special tokens, which are not part of
    the text, and EOS begin where the text goes on.
    """
    if tokenizer.decode(list(tokens), skip_special_tokens=True) != text:
        return None
    found = _streamed(tokenizer, tokens, text)
    return found or (_from_prefixes(tokenizer, tokens, text) if len(tokens) <= LONGEST_SEARCHED else None)


def _streamed(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Decode token by token; nothing where that gives another text than decoding all at once.

    It does where bytes spell no character: byte fallback then shows none of the characters beside them either.
    """
    stream = DecodeStream(skip_special_tokens=True)
    starts: list[int] = []
    pending: list[int] = []
    at = 0
    for token in tokens:
        pending.append(token)
        try:
            piece = stream.step(tokenizer, token)
        except Exception:  # "invalid prefix"; the library raises nothing more precise
            return []
        if piece is not None:
            if not text.startswith(piece, at):
                return []
            starts += _starts(tokenizer, pending, piece, at)
            pending, at = [], at + len(piece)
    return starts + _starts(tokenizer, pending, text[at:], at)


def _from_prefixes(tokenizer: Tokenizer, tokens: Sequence[int], text: str) -> list[int]:
    """Say how much of the text the tokens before each one spell; takes the square of their number."""
    spelt = (tokenizer.decode(list(tokens[:count]), skip_special_tokens=True) for count in range(len(tokens)))
    return list(accumulate((_common(prefix, text) for prefix in spelt), max))


def token_texts(starts: Sequence[int], text: str) -> tuple[str, ...]:
    """Cut a text where its tokens begin; a character of several tokens is with the last of them."""
    return tuple(text[begin:end] for begin, end in pairwise((*starts, len(text))))


def _starts(tokenizer: Tokenizer, tokens: Sequence[int], piece: str, at: int) -> list[int]:
    """Say where tokens begin that together spell a piece: each after the characters that those before it complete."""
    if len(tokens) < 2:
        return [at] * len(tokens)
    spelt = (tokenizer.decode(list(tokens[:count]), skip_special_tokens=True) for count in range(1, len(tokens)))
    return [at, *(at + _common(text, piece) for text in spelt)]


def _common(first: str, second: str) -> int:
    """Count the characters that two texts begin with alike."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
