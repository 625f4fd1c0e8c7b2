"""Tokenizer of a policy: training from texts, loading with checks, and tokenization of prompts."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, cast

from pydantic import JsonValue
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.config.texts import RULES_BEFORE, TextRules
from rheostat.models.data.images import ImageHeader, read_header
from rheostat.models.data.problems import (
    NO_ARGUMENTS,
    Message,
    Problem,
    Prompt,
    TemplateArguments,
    add_image_places,
    check_places,
    identity,
)
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.chats import TemplateFailed, render_chats
from rheostat.models.text.control_tokens import ControlTokens, count_appended_tokens
from rheostat.models.text.message_texts import as_message
from rheostat.models.text.template_fields import Chat, fit_chats
from rheostat.models.vision.processor import VisionProcessor

EOS = "<|eos|>"
PAD = "<|pad|>"

_PAD_NAME, _UNUSED_NAME = re.compile(r"pad", re.IGNORECASE), re.compile(r"unused|reserved|extra_id", re.IGNORECASE)
_MEDIA_NAME = re.compile(r"image|video|vision|audio|fim", re.IGNORECASE)

ToolSchema = Mapping[str, JsonValue]
"""JSON schema of a function, in the format of `transformers.utils.get_json_schema`."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Prompt as rendered text and as the model input of the policy."""

    text: str
    """Prompt as shown to rewards, judges and people. Plain text is unchanged, and a chat is rendered by the chat
    template."""
    input: ModelInput
    image_tokens: tuple[int, ...] = ()
    """Number of image tokens for each image in the prompt."""


def scratch_tokenizer(policy: ScratchPolicy, problems: Iterable[Problem]) -> PreTrainedTokenizerFast:
    """Train a tokenizer for a new policy on the prompts and solutions of problems."""
    return train_tokenizer(problem_texts(problems), vocab_size=policy.vocab_size, context=policy.context)


def problem_texts(problems: Iterable[Problem]) -> Iterator[str]:
    """Yield the texts of problems on which a policy's tokenizer is trained: prompts, and worked solutions or else
    answers."""
    return chain.from_iterable((identity(p.prompt), p.worked or p.answer) for p in problems)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can encode any text. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(directory: Path, *, kind: type[PreTrainedTokenizerFast] | None = None) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a policy. Raises BadInput if the tokenizer cannot be loaded, is not a fast tokenizer, or
    has no EOS token.

    If `kind` is None, transformers chooses the class from the model's configuration, which imports torch.
    """
    if not (directory / "tokenizer.json").is_file():
        raise BadInput(
            f"policy {directory}: the directory has no tokenizer.json. Save the model's fast tokenizer there with "
            "save_pretrained."
        )
    try:
        tokenizer = (kind or _automatic_class()).from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise BadInput(
            f"policy {directory}: the tokenizer cannot be loaded: {_first_line(error)}. Use a complete copy of the "
            "model"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BadInput(
            f"policy {directory}: the model needs a fast tokenizer (of the library tokenizers), but it has a "
            f"{type(tokenizer).__name__}. Save a fast tokenizer there with save_pretrained"
        )
    if tokenizer.eos_token_id is None:
        raise BadInput(f"policy {directory}: the tokenizer has no EOS token. Set eos_token in tokenizer_config.json.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = choose_pad_token(tokenizer)
    return tokenizer


def choose_pad_token(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the token to use for padding if the tokenizer's files name none: a special token that does not occur in
    texts, or else EOS. The choice does not affect results, because attention masks are computed from lengths."""
    template = str(tokenizer.chat_template or "")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    unused = [token for token in special if token not in template and token != tokenizer.eos_token]
    for pattern in (_PAD_NAME, _UNUSED_NAME):
        if named := [token for token in unused if pattern.search(token) and not _MEDIA_NAME.search(token)]:
            return named[0]
    return str(tokenizer.eos_token)


def find_chosen_pad_token(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return the ID of the pad token if `choose_pad_token` chose it, or None if the tokenizer's files name a pad
    token."""
    is_named = tokenizer.init_kwargs.get("pad_token") is not None
    return None if is_named else cast(int | None, tokenizer.pad_token_id)


def tokenize_problems(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerFast,
    processor: VisionProcessor | None = None,
    *,
    tools: Sequence[ToolSchema] = (),
    rules: TextRules = TextRules(),  # noqa: B008 -- immutable
) -> list[TokenizedPrompt]:
    """Render and tokenize the prompts of problems with the policy's tokenizer, which may describe `tools` to the
    policy. `rules` decide how control tokens in prompts are encoded. Raises BadInput if a prompt cannot be rendered."""
    prompts, images = [problem.prompt for problem in problems], [problem.images for problem in problems]
    sources = [problem.source for problem in problems]
    arguments = [problem.template.with_default_tools(tools) for problem in problems]
    return tokenize_prompts(
        prompts,
        tokenizer,
        sources=sources,
        images=images,
        processor=processor,
        arguments=arguments,
        rules=rules,
    )


def tokenize_prompts(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerFast,
    *,
    sources: Sequence[str],
    images: Sequence[Sequence[bytes]] | None = None,
    processor: VisionProcessor | None = None,
    arguments: Sequence[TemplateArguments] | None = None,
    rules: TextRules = TextRules(),  # noqa: B008 -- immutable
) -> list[TokenizedPrompt]:
    """Render and tokenize prompts. Chat templates add their own special tokens; to plain text the tokenizer adds its
    special tokens. `sources` are the origins of the prompts in messages, `images` the encoded images of each prompt,
    `arguments` the template arguments of each prompt, and `rules` decide how control tokens in prompts are encoded.
    Raises BadInput if a prompt cannot be rendered or has invalid images."""
    headers = [
        _read_headers(prompt_images, source=source)
        for prompt_images, source in zip(images or [()] * len(prompts), sources, strict=True)
    ]
    counts = list(map(len, headers))
    control = ControlTokens.of(tokenizer, images=[] if processor is None else [processor.placeholder])
    given = [*(arguments or [NO_ARGUMENTS] * len(prompts))]
    shown = [(as_message(each),) for each in given if each != NO_ARGUMENTS]
    marks = None if rules.parses_control_tokens else control.choose_marks([*prompts, *shown])
    marked = prompts if marks is None else [control.mark_prompt(prompt, marks) for prompt in prompts]
    if marks is not None:
        given = [control.mark_arguments(each, marks) for each in given]
    texts = render(marked, tokenizer, sources=sources, images=counts, processor=processor, arguments=given)
    token_ids: dict[int, list[int]] = {}
    for special in (True, False):
        rows = [row for row, prompt in enumerate(prompts) if isinstance(prompt, str) == special]
        encoded = control.encode([texts[row] for row in rows], marks, add_special_tokens=special)
        num_appended = count_appended_tokens(tokenizer) if rows and special and rules.ends_as_template else 0
        token_ids |= zip(rows, (tokens[: len(tokens) - num_appended] for tokens in encoded), strict=True)
    if marks is not None:
        texts = [marks.restore(marks.decode(text)) for text in texts]
    prompt_texts = [prompt if isinstance(prompt, str) else text for prompt, text in zip(prompts, texts, strict=True)]
    if processor is None:
        return [TokenizedPrompt(text, ModelInput.from_prompt(token_ids[row])) for row, text in enumerate(prompt_texts)]
    expanded = []
    for row, text in enumerate(prompt_texts):
        try:
            tokens = processor.expand(token_ids[row], [each.size for each in headers[row]])
        except ValueError as error:
            raise BadInput(f"{sources[row]}: {_first_line(error)}") from error
        model_input = ModelInput.from_prompt(tokens, [each.digest for each in headers[row]])
        expanded.append(
            TokenizedPrompt(text, model_input, tuple(processor.count_tokens(each.size) for each in headers[row]))
        )
    return expanded


def tokenize_questions(
    texts: Sequence[str],
    images: Sequence[Sequence[bytes]],
    tokenizer: PreTrainedTokenizerFast,
    *,
    chat: bool,
    processor: VisionProcessor | None,
    rules: TextRules = RULES_BEFORE,
) -> list[TokenizedPrompt]:
    """Tokenize the prompts of a judge, each with its images. With `chat`, each prompt becomes a user message if the
    tokenizer has a chat template. `rules` decide how control tokens in prompts are encoded."""
    in_turns = chat and bool(tokenizer.chat_template)
    turns: list[Prompt] = [(Message("user", text),) if in_turns else text for text in texts]
    sources = ["question for the judge"] * len(turns)
    # Texts in questions are escaped, and the judge's own template may contain control tokens.
    return tokenize_prompts(turns, tokenizer, sources=sources, images=images, processor=processor, rules=rules)


def _read_headers(images: Sequence[bytes], *, source: str) -> list[ImageHeader]:
    """Read the headers (format and size) of the images of one prompt. `source` is the origin of the prompt in
    messages."""
    return [read_header(encoded, where=f"{source}: image {index + 1}") for index, encoded in enumerate(images)]


def render(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerFast,
    *,
    sources: Sequence[str],
    images: Sequence[int] | None = None,
    processor: VisionProcessor | None = None,
    arguments: Sequence[TemplateArguments] | None = None,
) -> list[str]:
    """Render prompts: plain text unchanged, chats by the tokenizer's chat template up to the start of the assistant's
    turn. `sources` are the origins of the prompts in messages, `images` the number of images of each prompt, and
    `arguments` the template arguments of each prompt. Raises BadInput if the policy cannot process images, the
    tokenizer has no chat template, or the template rejects a chat.

    In plain text, image placeholders are put before the text.
    """
    counts = images or [0] * len(prompts)
    for prompt, count, source in zip(prompts, counts, sources, strict=True):
        if count and processor is None:
            raise BadInput(
                f"{source}: the prompt has {format_count(count, 'image')}, but the policy reads only text. Use a "
                "vision-language policy, or remove data.images_column"
            )
        check_places(prompt, count, source=source)
    chats = {row: prompt for row, prompt in enumerate(prompts) if not isinstance(prompt, str)}
    rows = list(chats)
    if rows and not tokenizer.chat_template:
        raise BadInput(
            f"{sources[rows[0]]}: the prompt is a chat, but the policy's tokenizer has no chat template. Write the "
            "prompts as plain text, or use a policy with a chat template."
        )
    in_parts = processor is not None and bool(rows) and not renders_plain_text(tokenizer)
    given = arguments or [NO_ARGUMENTS] * len(prompts)
    encoded = [_build_chat(chat, counts[row], in_parts=in_parts) for row, chat in chats.items()]
    turns: dict[int, Chat] = dict(zip(rows, encoded, strict=True))
    if not in_parts:
        turns = dict(zip(rows, fit_chats(encoded, tokenizer, [given[row] for row in rows]), strict=True))
    rendered: dict[int, str] = {}
    for alike in _group_by_arguments([(row, given[row]) for row in rows]):
        own, members = given[alike[0]], [turns[row] for row in alike]
        try:
            texts = render_chats(members, tokenizer, generation_prompt=True, tools=own.tools, kwargs=own.kwargs)
        except TemplateFailed as error:
            raise BadInput(f"{sources[alike[error.chat]]}: the policy's chat template {_first_line(error)}") from error
        rendered |= zip(alike, texts, strict=True)
    before = "" if processor is None else processor.shown
    return [
        before * counts[row] + prompt if isinstance(prompt, str) else rendered[row]
        for row, prompt in enumerate(prompts)
    ]


def _group_by_arguments(rows: Iterable[tuple[int, TemplateArguments]]) -> list[list[int]]:
    """Group rows by their template arguments, and return the row numbers of each group. The chats of a group are
    rendered in one request."""
    groups: dict[str, list[int]] = {}
    for row, arguments in rows:
        key = json.dumps([arguments.tools, arguments.kwargs], default=dict)
        groups.setdefault(key, []).append(row)
    return [*groups.values()]


def _build_chat(chat: Sequence[Message], images: int, *, in_parts: bool) -> list[dict[str, object]]:
    """Convert the messages of a chat to dicts for a chat template, with placeholders for `images` images. With
    `in_parts`, each content becomes a list of parts."""
    placed = add_image_places(tuple(chat), images) if images or in_parts else chat
    return [turn.encode() for turn in placed]


def renders_plain_text(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether the chat template renders message contents that are a plain text instead of a list of parts. Some
    templates of vision models omit such contents."""
    probe = "a content that is plain text"
    try:
        [rendered] = render_chats([[{"role": "user", "content": probe}]], tokenizer, generation_prompt=True)
    except TemplateFailed:
        return False
    return probe in rendered


TokenizedProblems = list[tuple[Problem, TokenizedPrompt]]
"""Problems, each with its tokenized prompt, in the order of the data."""


def enforce_prompt_length(
    asked: TokenizedProblems, *, max_tokens: int, too_long: Literal["refuse", "drop"], split: str
) -> TokenizedProblems:
    """Handle problems whose prompt has more than `max_tokens` tokens: "drop" removes these problems, "refuse" raises
    BadInput, which lists all empty or too long prompts. BadInput is also raised if no problem is left. `split` names
    the data split in messages."""
    input_errors, fitting = InputErrors(), TokenizedProblems()
    for problem, prompt in asked:
        if len(prompt.input) > max_tokens and too_long == "drop":
            continue
        with input_errors.collect(problem.source):
            _require_room(problem, prompt, max_tokens=max_tokens)
            fitting.append((problem, prompt))
    input_errors.check()
    if not fitting:
        raise BadInput(
            f"data.drop with 'too_long' (or data.on_too_long = 'drop') leaves no {split} problem, because all "
            f"{len(asked)} prompts have more than {max_tokens} tokens (the policy's context minus "
            "rollout.sampling.max_new_tokens). Lower max_new_tokens, or use a policy with a longer context."
        )
    return fitting


def _require_room(problem: Problem, prompt: TokenizedPrompt, *, max_tokens: int) -> None:
    """Raise BadInput if a prompt is empty or has more than `max_tokens` tokens."""
    if not 0 < len(prompt.input) <= max_tokens:
        raise BadInput(
            f"{problem.source}: the prompt has "
            f"{format_count(len(prompt.input), 'token')}{_describe_image_tokens(prompt)}, but it must have 1 to "
            f"{max_tokens} tokens (the policy's context minus rollout.sampling.max_new_tokens). Shorten or remove the "
            "prompt, lower max_new_tokens, or set data.on_too_long = 'drop'."
        )


def _describe_image_tokens(prompt: TokenizedPrompt) -> str:
    """Return a text for error messages that states the number of tokens of each image in a prompt."""
    takes = [f"{tokens} for image {index}" for index, tokens in enumerate(prompt.image_tokens, start=1)]
    return f" ({', '.join(takes)})" if takes else ""


def _automatic_class() -> type[PreTrainedTokenizerFast]:
    """Return transformers' AutoTokenizer, which chooses the tokenizer class by the model. Importing it imports
    torch."""
    from transformers import AutoTokenizer

    return cast(type[PreTrainedTokenizerFast], AutoTokenizer)


def build_token_decoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[int], str]:
    """Return a function that converts a token ID to the token's text."""
    return lambda token: str(tokenizer.decode([token]))


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
