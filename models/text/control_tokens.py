"""Control tokens that occur in texts: detection, and encoding as ordinary text. Torch-free.

A tokenizer encodes each special token that occurs in a text as its id, no matter who wrote the text. A user could
therefore end a turn and begin another. To prevent this, a separator is inserted into each control token in a text
before the chat is rendered, so only control tokens without a separator come from the chat template. The rendered text
is then encoded by a copy of the tokenizer in which control tokens have other names, after the control tokens from the
template have been renamed in the text. The result is the same as if the tokenizer did not know the control tokens in
users' texts.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Final

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from models.data.problems import Message, Prompt
from models.text.chats import join_templates

PRIVATE_USE: Final = range(0xE000, 0xF900)
"""Code points of private-use characters, which have no meaning, from which separators are chosen."""
_ALIASES: Final = range(0xF0000, 0xFFFFE)
"""Code points of private-use characters that replace control tokens while a text is encoded."""


def separator_for(text: str) -> str:
    """Return a private-use character that does not occur in the text."""
    return next(mark for mark in map(chr, PRIVATE_USE) if mark not in text)


def break_tokens(pattern: re.Pattern[str], text: str, separator: str) -> str:
    """Insert a separator after the first character of every match of a pattern in a text, including nested matches."""
    return re.sub(f"(?=(?:{pattern.pattern})).", rf"\g<0>{separator}", text, flags=re.DOTALL)


def control_token_pattern(
    tokenizer: PreTrainedTokenizerFast, *, template: str = "", others: Sequence[str] = ()
) -> re.Pattern[str]:
    """Return a pattern that matches special tokens, added tokens that `template` contains, and `others`.

    Tokens that consist of one character are excluded.
    """
    added = (token for token in tokenizer.added_tokens_decoder.values() if token.special or token.content in template)
    contents = {token.content for token in added} | set(others)
    control = sorted((each for each in contents if len(each) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, control)) or "(?!)")


@dataclass(frozen=True, slots=True, eq=False)
class ControlTokens:
    """Control tokens of a tokenizer, and the encoding of texts that contain them."""

    tokenizer: PreTrainedTokenizerFast = field(repr=False)
    pattern: re.Pattern[str]
    """Pattern for all control tokens: special tokens, and added tokens that the chat template writes."""
    special: re.Pattern[str]
    """Pattern for special tokens only. Turns of the assistant may contain other control tokens, such as `<think>`,
    because policies generate them."""

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerFast, *, images: Sequence[str] = ()) -> "ControlTokens":
        """Return the control tokens of a tokenizer. `images` are the texts of its image tokens."""
        return ControlTokens(
            tokenizer,
            control_token_pattern(tokenizer, template=join_templates(tokenizer), others=images),
            control_token_pattern(tokenizer, others=images),
        )

    def find(self, prompt: Prompt) -> str | None:
        """Return the first control token that occurs in a prompt, or None."""
        if isinstance(prompt, str):
            texts = [(self.pattern, prompt)]
        else:
            texts = [(self._pattern_for(each), text) for each in prompt for text in (*_texts_of(each), each.text)]
        return next((match[0] for pattern, text in texts if (match := pattern.search(text))), None)

    def find_special(self, completion: str) -> str | None:
        """Return the first special token that a completion of a training example contains, or None."""
        match = self.special.search(completion)
        return None if match is None else match[0]

    def break_prompt(self, prompt: Prompt, separator: str) -> Prompt:
        """Return the prompt with a separator inserted into each control token."""
        if isinstance(prompt, str):
            return break_tokens(self.pattern, prompt, separator)
        return tuple(self._break_message(each, separator) for each in prompt)

    def choose_separator(self, prompts: Sequence[Prompt]) -> str | None:
        """Return a character that does not occur in the prompts, or None if no prompt contains a control token."""
        if not any(map(self.find, prompts)):
            return None
        return separator_for("".join(text for prompt in prompts for text in _texts_of_prompt(prompt)))

    def encode(self, texts: Sequence[str], separator: str | None, *, add_special_tokens: bool) -> list[list[int]]:
        """Encode texts. A control token that contains `separator` is encoded as ordinary text.

        If `separator` is None, the tokenizer itself encodes the texts.
        """
        if not texts:
            return []
        broken = [row for row, text in enumerate(texts) if separator is not None and separator in text]
        token_ids: list[list[int]] = self.tokenizer([*texts], add_special_tokens=add_special_tokens)["input_ids"]
        if separator is not None and broken:
            tokenizer, aliases = self._rename(texts)
            prepared = [
                self.pattern.sub(lambda token: aliases[token[0]], texts[row]).replace(separator, "") for row in broken
            ]
            encoded = tokenizer.encode_batch(prepared, add_special_tokens=add_special_tokens)
            for row, encoding in zip(broken, encoded, strict=True):
                token_ids[row] = encoding.ids
        return token_ids

    def encode_completions(self, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Encode completions of training examples, each given with the text that a chat template writes after it.

        Special tokens in completions are encoded as ordinary text.
        """
        joined = [text + closing for text, closing in texts]
        if not any(self.special.search(text) for text, _ in texts):
            return self.encode(joined, None, add_special_tokens=False)
        separator, own = separator_for("".join(joined)), replace(self, pattern=self.special)
        broken = [break_tokens(self.special, text, separator) + closing for text, closing in texts]
        return own.encode(broken, separator, add_special_tokens=False)

    def _rename(self, texts: Sequence[str]) -> tuple[Tokenizer, dict[str, str]]:
        """Return a copy of the tokenizer in which control tokens have other names, and the new names by token.

        Each new name is a character that occurs in none of the texts.
        """
        added = {token.content for token in self.tokenizer.added_tokens_decoder.values()}
        tokens = sorted(filter(self.pattern.fullmatch, added))
        used = set().union(*texts)
        free = (character for character in map(chr, _ALIASES) if character not in used)
        aliases = dict(zip(tokens, free, strict=False))
        return _rename_tokens(self.tokenizer, tuple(aliases.items())), aliases

    def _break_message(self, message: Message, separator: str) -> Message:
        """Return the message with a separator inserted into each control token, including tokens that span several
        parts of its content."""
        pattern = self._pattern_for(message)
        in_parts = not isinstance(message.content, str) and pattern.search(message.text) is not None
        between = separator if in_parts else ""
        broken = {
            each.name: _map_texts(
                getattr(message, each.name), lambda text: break_tokens(pattern, text, separator) + between
            )
            for each in fields(message)
            if each.name != "role"
        }
        return replace(message, **broken)

    def _pattern_for(self, message: Message) -> re.Pattern[str]:
        """Return the pattern for control tokens that must be encoded as ordinary text in the texts of this message."""
        return self.special if message.role == "assistant" else self.pattern


def _texts_of_prompt(prompt: Prompt) -> list[str]:
    """Return all texts of a prompt."""
    return [prompt] if isinstance(prompt, str) else [text for each in prompt for text in _texts_of(each)]


def _texts_of(message: Message) -> list[str]:
    """Return all texts of a message except its role."""
    texts = list[str]()

    def add(text: str) -> str:
        """Collect a text and return it unchanged."""
        texts.append(text)
        return text

    for each in fields(message):
        if each.name != "role":
            _map_texts(getattr(message, each.name), add)
    return texts


def count_appended_tokens(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of tokens, such as EOS, that the tokenizer appends to every text."""
    mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return next((number for number, special in enumerate(reversed(mask)) if not special), 0)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 -- a field of a message
    """Return the value of a message's field with each text changed.

    Keys and types of parts stay the same if they are plain names, which templates compare.
    """
    match value:
        case str():
            return change(value) if value else value
        case Mapping():
            return {
                key if key.isidentifier() else change(key): each
                if key == "type" and isinstance(each, str) and each.isidentifier()
                else _map_texts(each, change)
                for key, each in value.items()
            }
        case tuple():
            return tuple(_map_texts(each, change) for each in value)
        case list():
            return [_map_texts(each, change) for each in value]
        case _:
            return value


@lru_cache(maxsize=4)
def _rename_tokens(tokenizer: PreTrainedTokenizerFast, renamed: tuple[tuple[str, str], ...]) -> Tokenizer:
    """Return a copy of a tokenizer in which added tokens have other names but the same ids.

    `renamed` contains pairs of old and new names. Copies are cached, because copying a large vocabulary takes a second.
    """
    names = dict(renamed)
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["truncation"] = document["padding"] = None
    for token in document["added_tokens"]:
        # A name is a single character without a meaning, which no normalizer may change.
        if token["content"] in names:
            token.update(content=names[token["content"]], normalized=False, single_word=False)
    model = document["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # unigram: pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(document))
