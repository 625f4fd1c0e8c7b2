"""Alignment of two tokenizations of the same text, so that a teacher with another tokenizer can score a completion.

A span is a part of the text at whose end a token of both tokenizations ends, and within which this is the case nowhere.
Shapes: S spans, W completion tokens of the policy, U completion tokens of the teacher.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rheostat.infra.errors import BadInput

_BYTE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE: Final = "\u2581"
"""Character that SentencePiece writes instead of a space."""

Span = tuple[slice, slice]
"""Tokens of the policy and tokens of the teacher with the same text, as ranges of the two completions."""


@dataclass(frozen=True, slots=True)
class AlignedCompletion:
    """Completion of the policy as tokens of the teacher."""

    tokens: list[int]
    spans: tuple[Span, ...]
    """Parts that are compared. Tokens outside of them have no signal."""


def build_byte_decoder(tokenizer: PreTrainedTokenizerFast, *, where: str) -> Callable[[int], bytes]:
    """Return a function that returns the bytes of a token, which may be a part of a character. Raises BadInput, which
    names the tokenizer as `where`, if its tokens are not pieces of the text, as in WordPiece."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    kinds = {each["type"] for each in [state, *state.get("decoders", ())] if "type" in each}
    added: dict[int, bytes] = {
        number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()
    }
    alphabet: dict[int, str] = bytes_to_unicode()
    values: dict[str, int] = {character: value for value, character in alphabet.items()}
    if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
        raise BadInput(
            f"{where}: tokens cannot be aligned by text, because the tokenizer neither encodes bytes nor has pieces of "
            "SentencePiece. Use a model with such a tokenizer"
        )

    def read(token: int) -> bytes:
        """Return the bytes of a token."""
        if token in added:
            return added[token] if "ByteLevel" in kinds else added[token].replace(_SPACE.encode(), b" ")
        piece: str | None = tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # some models have more token IDs than their tokenizers
            return b""
        if "ByteLevel" in kinds:
            return b"".join(bytes([values[each]]) if each in values else each.encode() for each in piece)
        return _read_sentence_piece(piece)

    return read


def _read_sentence_piece(piece: str) -> bytes:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def find_spans(policy: Sequence[bytes], teacher: Sequence[bytes]) -> tuple[Span, ...]:
    """Return the spans of two tokenizations, given the bytes of each token. If the texts differ, the spans end at the
    first difference."""
    texts = b"".join(policy), b"".join(teacher)
    same = next((place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    ends_W, ends_U = (np.cumsum([len(each) for each in tokens]) for tokens in (policy, teacher))
    ends_S = np.intersect1d(ends_W[ends_W <= same], ends_U)
    lasts = [[0, *np.searchsorted(ends, ends_S, side="right").tolist()] for ends in (ends_W, ends_U)]
    sides = [[slice(begin, end) for begin, end in pairwise(last)] for last in lasts]
    return tuple(zip(*sides, strict=True))


def align_completion(
    completion: Sequence[int],
    *,
    policy_bytes: Callable[[int], bytes],
    teacher_bytes: Callable[[int], bytes],
    teacher: PreTrainedTokenizerFast,
    ends: frozenset[int],
    teacher_end: int,
    max_tokens: int,
) -> AlignedCompletion:
    """Return a completion of the policy as tokens of the teacher, with their spans.

    `ends` are the tokens with which the policy ends a completion. Such a last token is a separate span, with the token
    `teacher_end` with which the teacher ends one. A text that is not valid UTF-8 is cut before the first wrong byte.
    The teacher reads at most `max_tokens` tokens. After a cut or a difference of the texts, there are no more spans.
    """
    has_end = len(completion) > 0 and completion[-1] in ends
    pieces = [policy_bytes(token) for token in (completion[:-1] if has_end else completion)]
    data = b"".join(pieces)
    text = _decode_valid(data)
    tokens: list[int] = teacher(text, add_special_tokens=False, split_special_tokens=True).input_ids
    is_cut = len(text.encode()) < len(data) or len(tokens) + has_end > max_tokens
    tokens = tokens[: max(0, max_tokens)]
    theirs = [teacher_bytes(token) for token in tokens]
    read = b"".join(theirs)
    if _count_spaces(read) > _count_spaces(data):
        theirs[0] = theirs[0][1:]  # some tokenizers of SentencePiece put a space before every text
        read = read[1:]
    spans = find_spans(pieces, theirs)
    if has_end and not is_cut and read == data:
        spans += ((slice(len(pieces), len(pieces) + 1), slice(len(tokens), len(tokens) + 1)),)
        tokens = [*tokens, teacher_end]
    return AlignedCompletion(tokens, spans)


def _count_spaces(data: bytes) -> int:
    """Return the number of spaces at the beginning."""
    return len(data) - len(data.lstrip(b" "))


def _decode_valid(data: bytes) -> str:
    """Return the text of the bytes up to the first byte that is not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


def spread_differences(
    policy_W: NDArray[np.float32], teacher_U: NDArray[np.float32], spans: Sequence[Span]
) -> NDArray[np.float32]:
    """Return log-probs for the policy's tokens (W) whose differences from `policy_W` are the signal of the teacher.

    Each token of a span has the same difference: the sum of the teacher's log-probs in the span minus the sum of the
    policy's, divided by the number of the policy's tokens. The sum over the tokens of a span is therefore the
    log-ratio of its text (chain rule, as in GOLD). Tokens outside of spans have the difference 0.
    """
    aligned_W = policy_W.astype(np.float64)
    for own, theirs in spans:
        difference = teacher_U[theirs].sum(dtype=np.float64) - policy_W[own].sum(dtype=np.float64)
        aligned_W[own] += difference / (own.stop - own.start)
    return aligned_W.astype(np.float32)
