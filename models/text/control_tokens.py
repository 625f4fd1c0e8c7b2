"""Control tokens that occur in texts: detection, and encoding as ordinary text. Torch-free.

A tokenizer turns each special token that it finds in a text into its id, no matter who wrote the text. A user could
therefore end a turn and begin another. Here only a chat template writes control tokens. Before a chat is rendered, the
first character of each control token in a text is replaced by a mark, a character without a meaning. Templates can
therefore cut, compare, repeat or encode texts as usual. The control tokens that the tokenizer finds in the rendered
chat are those of the template. The chat is then encoded by a copy of the tokenizer in which control tokens have other
names, and only the control tokens of the template are renamed in the chat. The result has the same ids, and the same
tokens around them, as if the control tokens in texts were unknown to the tokenizer.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, count
from typing import Any, Final, cast

from pydantic import JsonValue
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from rheostat.models.data.problems import NO_ARGUMENTS, Message, Prompt, TemplateArguments
from rheostat.models.text.chats import join_templates
from rheostat.models.text.message_texts import as_message, list_texts, map_message

PRIVATE_USE: Final = range(0xE000, 0xF900)
"""Range of Unicode characters without a meaning (private use), from which separators and marks are chosen."""
_ALIASES: Final = (range(0x2800, 0x2900), range(0x1D000, 0x1D0F6), range(0x1F030, 0x1F094))
"""Ranges of Unicode symbols that replace control tokens while a text is encoded. No usual normalizer of a tokenizer
changes or removes them."""


_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")


def separator_for(text: str) -> str:
    """Return a Unicode character without a meaning (private use) that does not occur in the text."""
    return next(mark for mark in map(chr, PRIVATE_USE) if mark not in text)


def break_tokens(pattern: re.Pattern[str], text: str, separator: str) -> str:
    """Insert a separator after the first character of every match of a pattern in a text, including nested matches, so
    that control tokens become ordinary text."""
    return re.sub(f"(?=(?:{pattern.pattern})).", rf"\g<0>{separator}", text, flags=re.DOTALL)


def control_token_pattern(tokenizer: PreTrainedTokenizerFast, *, template: str = "") -> re.Pattern[str]:
    """Return a regular expression that matches the control tokens in the texts of environments. These are the
    tokenizer's special tokens, and the added tokens that `template` contains, if they have more than one character."""
    added = (token for token in tokenizer.added_tokens_decoder.values() if token.special or token.content in template)
    return _match_any({token.content for token in added if len(token.content) > 1})


def _match_any(contents: set[str], flags: int = 0) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts in `contents`. If several match at the same place, it matches the
    longest."""
    return re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))) or "(?!)", flags)


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters without a meaning (marks) that replace the first characters of control tokens in texts, so that the
    tokenizer does not find these tokens."""

    marks: Mapping[str, str]
    """Mark for each character with which a control token begins, keyed by that character."""

    def restore(self, text: str) -> str:
        """Return a text with each mark replaced by the character for which it stands, which undoes the marking."""
        return text.translate({ord(mark): character for character, mark in self.marks.items()})

    def decode(self, text: str) -> str:
        """Return a rendered text in which marks that the template wrote as JSON escapes are marks again."""
        for character, mark in self.marks.items():
            original = mark if character.isascii() else _escape(character)
            text = text.replace(_escape(mark), original)
        return text

    def occur_in(self, text: str) -> bool:
        """Return whether the text contains one of these marks."""
        return any(mark in text for mark in self.marks.values())


def _escape(character: str) -> str:
    """Return the JSON escape of a character, or the character itself if JSON does not escape it."""
    return json.dumps(character)[1:-1]


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Set of control tokens (such as `<|im_end|>`), with patterns that find them in texts."""

    contents: frozenset[str]
    exact: re.Pattern[str]
    any_case: re.Pattern[str]
    """Pattern of the control tokens in any letter case, because a template may change the case of a text."""
    starts: re.Pattern[str]
    """Pattern that matches every character with which a control token of the set begins."""

    @staticmethod
    def of(contents: set[str]) -> "TokenSet":
        """Build a set of control tokens. White space and byte tokens (parts of characters) among `contents` are left
        out."""
        named = {content for content in contents if content.strip() and not _BYTE.fullmatch(content)}
        starts = "".join(re.escape(character) for each in named for character in {each[0].lower(), each[0].upper()})
        return TokenSet(
            frozenset(named),
            _match_any(named),
            _match_any(named, re.IGNORECASE),
            re.compile(f"[{starts}]" if starts else "(?!)"),
        )

    def find(self, text: str, *, any_case: bool = False) -> Iterator[re.Match[str]]:
        """Yield the matches of control tokens in a text, including nested ones. With `any_case`, letter case is
        ignored."""
        pattern = self.any_case if any_case else self.exact
        for start in self.starts.finditer(text):
            if (match := pattern.match(text, start.start())) is not None:
                yield match


@dataclass(frozen=True, slots=True, eq=False)
class ControlTokens:
    """Control tokens of a tokenizer (special tokens, and tokens that its chat template writes), and methods that encode
    texts in which they occur."""

    tokenizer: PreTrainedTokenizerFast = field(repr=False)
    all: TokenSet
    """All control tokens: special tokens, and added tokens that the chat template writes, such as `<think>`. Added
    words without any punctuation, and white space, are ordinary text."""
    special: TokenSet
    """Special tokens only. Texts of the assistant may contain the other control tokens, because policies generate
    them."""
    normalized_ids: frozenset[int]
    """IDs of control tokens that the tokenizer finds only after it has normalized a text. Other spellings, such as
    full-width letters, may become these tokens."""

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerFast, *, images: Sequence[str] = ()) -> "ControlTokens":
        """Return the control tokens of a tokenizer. `images` are the texts of its image tokens."""
        template, added = join_templates(tokenizer), tokenizer.added_tokens_decoder
        special = {token.content for token in added.values() if token.special} | set(images)
        written = {
            token.content
            for token in added.values()
            if len(token.content) > 1 and token.content in template and re.search(r"[^\w\s]", token.content)
        }
        tokens = TokenSet.of(special | written)
        backend = tokenizer.backend_tokenizer
        # models other than BPE find every entry of their vocabulary in a normalized text
        entries = set() if isinstance(backend.model, BPE) else backend.get_vocab(with_added_tokens=False).keys()
        normalized = {
            number
            for number, token in added.items()
            if token.content in tokens.contents and (token.normalized or token.content in entries)
        }
        has_normalizer = backend.normalizer is not None
        ids = frozenset(normalized - {tokenizer.unk_token_id}) if has_normalizer else frozenset[int]()
        return ControlTokens(tokenizer, tokens, TokenSet.of(special), ids)

    # ---- detection
    def find(self, prompt: Prompt) -> str | None:
        """Return the first control token that occurs in the texts of a prompt, or None if there is none."""
        for tokens, text in self.texts_of(prompt):
            if (match := next(tokens.find(text), None)) is not None:
                return match[0]
            if positions := self._find_normalized(text):
                return text[positions[0] :].split()[0][:40]
        return None

    def find_special(self, completion: str) -> str | None:
        """Return the first special token that occurs in a completion of a training example, or None if there is
        none."""
        match = next(self.special.find(completion), None)
        return None if match is None else match[0]

    def choose_marks(self, prompts: Sequence[Prompt], *, others: Sequence[str] = ()) -> Marks | None:
        """Return marks (placeholder characters) that do not occur in the prompts or in the texts of `others`. Return
        None if no prompt contains a control token."""
        texts = [each for prompt in prompts for each in self.texts_of(prompt)]
        firsts = {text[place] for tokens, text in texts for place in self._find_places(tokens, text)}
        if not firsts:
            return None
        everything = "".join([*(text for _, text in texts), *others])
        free = (each for each in map(chr, PRIVATE_USE) if each not in everything and _escape(each) not in everything)
        return Marks(dict(zip(sorted(firsts), free, strict=False)))

    def texts_of(self, prompt: Prompt) -> Iterator[tuple[TokenSet, str]]:
        """Yield all texts of a prompt, each with the set of control tokens that must not be encoded as such in this
        text."""
        if isinstance(prompt, str):
            yield self.all, prompt
            return
        for message in prompt:
            tokens = self._tokens_for(message)
            yield from ((tokens, text) for text in list_texts(message))

    def _find_places(self, tokens: TokenSet, text: str) -> set[int]:
        """Return the indices in a text at which control tokens of the set `tokens` begin, in any letter case."""
        return {match.start() for match in tokens.find(text, any_case=True)} | set(self._find_normalized(text))

    def _find_normalized(self, text: str) -> list[int]:
        """Return the indices in a text at which control tokens begin that appear only after the tokenizer's
        normalization."""
        if not self.normalized_ids:
            return []
        encoding = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        spans = self._find_spans(text, encoding, self.normalized_ids)
        places = (end - len(text[begin:end].lstrip()) for begin, end, _ in spans)
        return [place for place in places if place < len(text)]

    def _find_spans(self, text: str, encoding: Encoding, ids: Any) -> Iterator[tuple[int, int, int]]:  # noqa: ANN401 -- a container of ids
        """Yield (first index, last index, token ID) for each token of the encoding with one of these IDs that is
        written out in the text. The unknown token, which replaces a character without a token, is not written out."""
        added = self.tokenizer.added_tokens_decoder
        for number, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if number in ids and begin < end:
                token, found = added[number].content, text[begin:end]
                if token in found or self._normalize(found) == self._normalize(token):
                    yield begin, end, number

    def _normalize(self, text: str) -> str:
        """Return a text after the tokenizer's normalization, without outer white space."""
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        return text.strip() if normalizer is None else normalizer.normalize_str(text.strip()).strip()

    def _tokens_for(self, message: Message) -> TokenSet:
        """Return the set of control tokens that must not be encoded as such in the texts of this message. The set
        depends on the message's role."""
        return self.special if message.role == "assistant" else self.all

    # ---- marks
    def mark_prompt(self, prompt: Prompt, marks: Marks) -> Prompt:
        """Return the prompt with the first character of each control token in its texts replaced by a mark, so that the
        token becomes ordinary text."""
        if isinstance(prompt, str):
            return self.mark_text(prompt, marks)
        return tuple(self._mark_message(each, marks) for each in prompt)

    def mark_text(self, text: str, marks: Marks, *, tokens: TokenSet | None = None) -> str:
        """Return the text with the first character of each control token replaced by its mark. `tokens` is the set of
        control tokens, by default all."""
        characters = [*text]
        for place in self._find_places(tokens or self.all, text):
            characters[place] = marks.marks[text[place]]
        return "".join(characters)

    def _mark_message(self, message: Message, marks: Marks) -> Message:
        """Return the message with the control tokens in its texts marked, including tokens that extend over several
        parts of its content."""
        tokens = self._tokens_for(message)
        return map_message(message, lambda text: self.mark_text(text, marks, tokens=tokens))

    def mark_arguments(self, arguments: TemplateArguments, marks: Marks) -> TemplateArguments:
        """Return the arguments of a chat template with the control tokens in their texts marked."""
        if arguments == NO_ARGUMENTS:
            return arguments
        fields = self._mark_message(as_message(arguments), marks).fields
        return TemplateArguments(tuple(cast(Any, fields["tools"])), cast(dict[str, JsonValue], fields["kwargs"]))

    # ---- encoding
    def encode(self, texts: Sequence[str], marks: Marks | None, *, add_special_tokens: bool) -> list[list[int]]:
        """Encode texts in which `marks` have replaced the first characters of control tokens, and encode these control
        tokens as ordinary text. Texts without a mark are encoded by the tokenizer itself."""
        if not texts:
            return []
        token_ids: list[list[int]] = self.tokenizer([*texts], add_special_tokens=add_special_tokens)["input_ids"]
        decoded = [text if marks is None else marks.decode(text) for text in texts]
        marked = [row for row, text in enumerate(decoded) if marks is not None and marks.occur_in(text)]
        if marks is not None and marked:
            tokenizer, aliases = self._rename("".join(decoded[row] for row in marked))
            encodings = self.tokenizer.backend_tokenizer.encode_batch(
                [decoded[row] for row in marked], add_special_tokens=False
            )
            prepared = [
                marks.restore(_replace_tokens(decoded[row], self._find_spans(decoded[row], encoding, aliases), aliases))
                for row, encoding in zip(marked, encodings, strict=True)
            ]
            encoded = tokenizer.encode_batch(prepared, add_special_tokens=add_special_tokens)
            for row, encoding in zip(marked, encoded, strict=True):
                token_ids[row] = encoding.ids
        return token_ids

    def encode_completions(self, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Encode the completions of training examples. Each is a pair of the completion's text and the text that the
        chat template writes after it. Special tokens in completions are encoded as ordinary text."""
        own = replace(self, all=self.special)
        marks = own.choose_marks([text for text, _ in texts], others=[closing for _, closing in texts])
        if marks is None:
            return self.encode([text + closing for text, closing in texts], None, add_special_tokens=False)
        marked = [own.mark_text(text, marks) + closing for text, closing in texts]
        return own.encode(marked, marks, add_special_tokens=False)

    def _rename(self, text: str) -> tuple[Tokenizer, dict[int, tuple[str, str]]]:
        """Return a copy of the tokenizer in which control tokens have other names, and a dict from token ID to (old
        name, new name). Each new name is a character that does not occur in the text. There are at most some hundred
        such characters, so only control tokens that the text may contain are renamed."""
        added = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        tokens = sorted(self.all.contents & added.keys())
        free = (character for character in map(chr, chain(*_ALIASES)) if character not in text)
        folded = text.casefold()
        needed = [each for each in tokens if each.casefold() in folded or added[each] in self.normalized_ids]
        aliases = dict(zip(needed, free, strict=False))
        return _rename_tokens(
            self.tokenizer, tuple(aliases.items()), tuple(each for each in tokens if each not in aliases)
        ), {added[token]: (token, alias) for token, alias in aliases.items()}


def _replace_tokens(text: str, spans: Iterable[tuple[int, int, int]], aliases: Mapping[int, tuple[str, str]]) -> str:
    """Return the text with the control tokens at `spans` (first index, last index, token ID) replaced by their new
    names, which `aliases` lists by token ID."""
    pieces, at = list[str](), 0
    for begin, end, number in spans:
        token, alias = aliases[number]
        found = text[begin:end]
        token = token if token in found else found.strip()  # the span may include white space around the token
        pieces += [text[at:begin], found.replace(token, alias, 1)]
        at = end
    return "".join([*pieces, text[at:]])


def count_appended_tokens(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of tokens, such as EOS, that the tokenizer appends to every text."""
    mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return next((number for number, special in enumerate(reversed(mask)) if not special), 0)


# ---- copies of tokenizers
@lru_cache(maxsize=4)
def _rename_tokens(
    tokenizer: PreTrainedTokenizerFast, renamed: tuple[tuple[str, str], ...], hidden: tuple[str, ...]
) -> Tokenizer:
    """Return a copy of a tokenizer in which added tokens have other names and the same IDs. `renamed` are pairs of old
    and new name. Tokens in `hidden` get new names that no text contains. Copies are cached, because copying a large
    vocabulary takes a second."""
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    document["truncation"] = document["padding"] = None
    taken = {token["content"] for token in document["added_tokens"]} | {name for _, name in renamed}
    unused = (name for name in (f"\U000f0000{number}\U000f0001" for number in count()) if name not in taken)
    names = dict(renamed) | dict(zip(hidden, unused, strict=False))
    for token in document["added_tokens"]:
        if token["content"] in hidden:
            token["normalized"] = False  # a normalizer could remove the private-use characters
        token["content"] = names.get(token["content"], token["content"])
    model = document["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):  # unigram: pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("merges"):  # a merge could build a control token from ordinary text
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return Tokenizer.from_str(json.dumps(document))
