"""Whole chats as model inputs for supervised training, in which the turns of the assistant are trained. Torch-free.

A turn begins where the chat template ends the prompt of a generation, and ends with the token that ends a turn, so the
trained tokens are those that a policy would generate. If the chat template marks the assistant's turns with
`{% generation %}` blocks, these blocks are trained. Otherwise the prompt of every turn is rendered and must be a prefix
of the whole rendered chat. Control tokens in the texts of messages are ordinary text.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from transformers import PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import TrainedTurns
from rheostat.models.data.images import read_header
from rheostat.models.data.problems import Message, TemplateArguments, add_image_places
from rheostat.models.data.training_chats import TrainingChat
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.chats import (
    MarkedChat,
    TemplateFailed,
    marks_generation,
    render_chats,
    render_marked_chats,
)
from rheostat.models.text.control_tokens import ControlTokens, Marks
from rheostat.models.text.message_texts import as_message
from rheostat.models.text.template_fields import Chat, fit_chats
from rheostat.models.text.tokenizer import renders_plain_text
from rheostat.models.text.turn_end import find_turn_end
from rheostat.models.text.turns import TURN, first_error_line
from rheostat.models.vision.processor import VisionProcessor

CHATS_AT_A_TIME: Final = 64
"""Number of chats that are prepared at a time, which limits memory."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Range of a trained turn of the assistant in a rendered chat, in characters."""

    begin: int
    end: int
    resumes: int | None = None
    """Index at which the text after the turn begins, or None if the template ends the turn with a token that ends
    completions. If it does not, such a token is inserted after the turn."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Rendered chat, with the ranges of the turns that are trained."""

    text: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive tokens of a chat that are either all trained or all context."""

    tokens: list[int]
    is_trained: bool


class ChatEncoder:
    """Encoder of whole chats as model inputs for supervised fine-tuning. `ends` are the tokens that end a completion
    according to the generation config, and `processor` prepares the images of a vision-language policy."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        loss: TrainedTurns = "assistant",
        rules: TextRules = TextRules(),  # noqa: B008 -- immutable
        ends: Collection[int] = (),
        processor: VisionProcessor | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise BadInput(
                "warmup.chats needs a chat template, but the policy's tokenizer has none. Add chat_template.jinja to "
                "the policy's directory, or remove warmup.chats."
            )
        self._tokenizer = tokenizer
        self._loss = loss
        self._rules = rules
        self._processor = processor
        self._in_parts = processor is not None and not renders_plain_text(tokenizer)
        turn_end, eos = find_turn_end(tokenizer, stated=ends), int(tokenizer.eos_token_id)
        self._end = eos if turn_end is None else turn_end.token
        self._ends_last_turn = turn_end is not None
        self._needs_turns = loss != "all" or turn_end is None
        known = tokenizer.convert_ids_to_tokens(sorted({*ends, eos, self._end}))
        self._ends = re.compile("|".join(map(re.escape, sorted(map(str, filter(None, known)), key=len, reverse=True))))
        self._control = ControlTokens.of(tokenizer, images=[] if processor is None else [processor.placeholder])

    def encode(self, chats: Sequence[TrainingChat]) -> list[list[ModelInput]]:
        """Return the model inputs of each chat. Each trained token is trained in exactly one input. Raises BadInput
        that lists all chats that cannot be encoded.

        A chat has one input, or one for each turn that is the first after images, because images are always part of a
        prompt.
        """
        encoded, input_errors = list[list[ModelInput]](), InputErrors()
        for start in range(0, len(chats), CHATS_AT_A_TIME):
            for chat, rendered, marks in self._render(chats[start : start + CHATS_AT_A_TIME], input_errors):
                with input_errors.collect(chat.source):
                    encoded.append(self._build_inputs(chat, rendered, marks))
        input_errors.check()
        return encoded

    # ---- rendering
    def _render(
        self, chats: Sequence[TrainingChat], input_errors: InputErrors
    ) -> Iterator[tuple[TrainingChat, RenderedChat, Marks | None]]:
        """Yield each valid chat with its rendered form, and with the marks that replace the control tokens in its
        texts. Invalid chats are added to `input_errors`."""
        prepared = []
        for chat in chats:
            with input_errors.collect(chat.source):
                prepared.append((chat, *self._prepare(chat)))
        fitted: Sequence[Chat] = [messages for _, _, messages, _ in prepared]
        if not self._in_parts:
            fitted = fit_chats(fitted, self._tokenizer, [arguments for *_, arguments in prepared])
        for (chat, marks, _, arguments), messages in zip(prepared, fitted, strict=True):
            rendered = None
            with input_errors.collect(chat.source):
                try:
                    rendered = self._render_chat(chat, messages, arguments)
                except TemplateFailed as error:
                    raise BadInput(f"{chat.source}: the policy's chat template {first_error_line(error)}") from error
            if rendered is not None:
                yield chat, rendered, marks

    def _prepare(self, chat: TrainingChat) -> tuple[Marks | None, list[dict[str, object]], TemplateArguments]:
        """Return the marks, the messages and the template arguments of a chat in the format of chat templates. The
        marks replace the control tokens in texts, or are None if there are no such tokens."""
        if chat.images and self._processor is None:
            raise BadInput(f"{chat.source}: the chat has images ({len(chat.images)}), but the policy reads only text")
        messages: tuple[Message, ...] = chat.messages
        if chat.images or self._in_parts:
            messages = add_image_places(messages, len(chat.images))
        if self._loss in ("assistant", "last"):
            messages = messages[: chat.turns[-1] + 1]  # nothing after the last turn is trained
        arguments, marks = chat.template, None
        if not self._rules.parses_control_tokens:
            marks = self._control.choose_marks([messages, (as_message(arguments),)])
        if marks is not None:
            marked = self._control.mark_prompt(messages, marks)
            messages = marked if isinstance(marked, tuple) else messages
            arguments = self._control.mark_arguments(arguments, marks)
        return marks, [message.encode() for message in messages], arguments

    def _render_chat(self, chat: TrainingChat, messages: Chat, arguments: TemplateArguments) -> RenderedChat:
        """Return the rendered messages of a chat with the ranges of its trained turns."""
        if self._loss == "completion":
            [whole] = self._render_texts([messages], arguments, generation_prompt=False)
            return RenderedChat(whole, (Turn(self._find_completion(chat, messages, whole, arguments), len(whole)),))
        if not marks_generation(self._tokenizer, tools=arguments.tools):
            return self._find_turns(chat, messages, arguments)
        [marked] = render_marked_chats([messages], self._tokenizer, tools=arguments.tools, kwargs=arguments.kwargs)
        return self._read_blocks(marked, self._find_completion(chat, messages, marked.text, arguments), chat.source)

    def _find_completion(self, chat: TrainingChat, messages: Chat, whole: str, arguments: TemplateArguments) -> int:
        """Return the index in the rendered chat `whole` at which its completion begins, or 0 if the row has no
        completion. Raises BadInput if the prompt is not a prefix of the whole chat."""
        if chat.num_prompt_messages is None:
            return 0
        [prompt] = self._render_texts([messages[: chat.num_prompt_messages]], arguments, generation_prompt=True)
        if not whole.startswith(prompt):
            raise BadInput(
                f"{chat.source}: the policy's chat template writes the prompt differently once the completion follows, "
                "for example because it removes earlier thoughts, so the completion has no clear beginning. Set "
                "warmup.chats.loss = 'last', or use a chat template that writes prompts the same way in both cases."
            )
        return len(prompt)

    def _read_blocks(self, whole: MarkedChat, start: int, source: str) -> RenderedChat:
        """Return a rendered chat whose trained turns are the parts after index `start` that the chat template marks as
        generated. Raises BadInput if the template marks no turn."""
        turns = [Turn(max(begin, start), end) for begin, end in whole.spans if max(begin, start) < end]
        if not turns:
            raise BadInput(
                f"{source}: the policy's chat template has {{% generation %}} blocks, but marks no turn of this chat"
            )
        return RenderedChat(whole.text, tuple(turns[-1:] if self._loss == "last" else turns))

    def _find_turns(self, chat: TrainingChat, messages: Chat, arguments: TemplateArguments) -> RenderedChat:
        """Render a chat whole and up to each turn of the assistant that is trained, and return it with the ranges of
        these turns. Raises BadInput if the prompt of a turn is not a prefix of the whole chat."""
        [whole] = self._render_texts([messages], arguments, generation_prompt=False)
        if not self._needs_turns:
            return RenderedChat(whole, ())
        turns = chat.turns[-1:] if self._loss == "last" else chat.turns
        prompts = self._render_texts([messages[:index] for index in turns], arguments, generation_prompt=True)
        for index, prompt in zip(turns, prompts, strict=True):
            if not whole.startswith(prompt):
                raise BadInput(
                    f"{chat.source}: messages[{index}]: the policy's chat template writes the messages before this "
                    "turn differently once later messages follow, for example because it removes earlier thoughts, so "
                    "the turn cannot be trained inside the whole chat. Set warmup.chats.loss = 'last' to train only "
                    "the last turn, or use a chat template with {% generation %} blocks."
                )
        limits = [*map(len, prompts[1:]), len(whole)]
        found = [self._ends.search(whole, len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)]
        open_turns = [index for index, end in zip(turns, found, strict=True) if end is None]
        contents = iter(self._find_ends_of_contents(messages, open_turns, whole, arguments, chat.source))
        return RenderedChat(
            whole,
            tuple(
                self._end_turn(len(prompt), next(contents), whole) if end is None else Turn(len(prompt), end.end())
                for prompt, end in zip(prompts, found, strict=True)
            ),
        )

    def _end_turn(self, begin: int, end: int, whole: str) -> Turn:
        """Return the range of a turn after which the template writes no known end token. If the template writes another
        control token after the turn, like `<|end|>` of GPT-OSS, that token is left out, as between the turns of an
        episode."""
        other = self._control.special.exact.match(whole, end) if self._ends_last_turn else None
        return Turn(begin, end, resumes=end if other is None else other.end())

    def _find_ends_of_contents(
        self, chat: Chat, turns: Sequence[int], whole: str, arguments: TemplateArguments, source: str
    ) -> list[int]:
        """Return the index in the rendered chat `whole` at which the content of each of these turns ends. The template
        writes no token at the end of these turns, so the chat is rendered again with a word after the content."""
        if not turns:
            return []
        marked: list[Chat] = [
            [*chat[:index], {**chat[index], "content": f"{chat[index].get('content') or ''}{TURN}"}, *chat[index + 1 :]]
            if not isinstance(chat[index].get("content"), list)
            else chat
            for index in turns
        ]
        ends = []
        for index, text in zip(turns, self._render_texts(marked, arguments, generation_prompt=False), strict=True):
            end = text.find(TURN)
            if end < 0 or text[:end] + text[end + len(TURN) :] != whole or chat[index].get("tool_calls"):
                raise BadInput(
                    f"{source}: messages[{index}]: the policy's chat template writes no token that ends this turn, so "
                    "the end of the turn is unknown. Add the token that the template writes there to eos_token_id in "
                    "generation_config.json, or use a chat template with {% generation %} blocks."
                )
            ends.append(end)
        return ends

    def _render_texts(
        self, chats: Sequence[Chat], arguments: TemplateArguments, *, generation_prompt: bool
    ) -> list[str]:
        return render_chats(
            chats,
            self._tokenizer,
            generation_prompt=generation_prompt,
            tools=arguments.tools,
            kwargs=arguments.kwargs,
        )

    # ---- encoding
    def _build_inputs(self, chat: TrainingChat, rendered: RenderedChat, marks: Marks | None) -> list[ModelInput]:
        """Return the model inputs of a rendered chat. Raises BadInput if the images do not match the image placeholders
        in the text."""
        pieces = self._encode_pieces(rendered, marks)
        if self._loss == "all":
            tokens = [token for piece in pieces for token in piece.tokens]
            if chat.images:
                raise BadInput(
                    f"{chat.source}: warmup.chats.loss = 'all' would train image tokens, which a policy never "
                    "generates. Use 'assistant'."
                )
            return [ModelInput.from_prompt(tokens[:1]).append_completion(tokens[1:])]
        return self._split_at_images(chat, pieces)

    def _split_at_images(self, chat: TrainingChat, pieces: Sequence[_Piece]) -> list[ModelInput]:
        """Return the model inputs of a chat. A new input begins after each piece of text with images, and its prompt
        contains all earlier tokens."""
        headers = [
            read_header(image, where=f"{chat.source}: image {number}")
            for number, image in enumerate(chat.images, start=1)
        ]
        inputs, current, used = list[ModelInput](), ModelInput(), 0
        for piece in pieces:
            tokens = piece.tokens
            count = 0 if self._processor is None else tokens.count(self._processor.place_id)
            if count:
                assert self._processor is not None
                if piece.is_trained:
                    raise BadInput(f"{chat.source}: a turn of the assistant has an image, but policies generate text")
                sizes = [each.size for each in headers[used : used + count]]
                try:
                    tokens = self._processor.expand(tokens, sizes)
                except ValueError as error:
                    raise BadInput(f"{chat.source}: {error}") from error
                used += count
                if current.num_completion_tokens:
                    inputs.append(current)
                images = [each.digest for each in headers[:used]]
                current = ModelInput.from_prompt([*current.tokens, *tokens], images)
            elif piece.is_trained:
                begin = 0 if len(current) else 1  # nothing predicts the first token
                current = current.append_observation(tokens[:begin]).append_completion(tokens[begin:])
            else:
                current = current.append_observation(tokens)
        if used != len(headers):
            raise BadInput(
                f"{chat.source}: the policy's chat template shows {format_count(used, 'image')}, but the row has "
                f"{len(headers)}"
            )
        return [*inputs, current]

    def _encode_pieces(self, rendered: RenderedChat, marks: Marks | None) -> list[_Piece]:
        """Return the tokens of a rendered chat in pieces, without the text after the last trained turn.

        The tokens are those of the whole text. Only if a token would cross the begin or end of a turn, the text is
        encoded in two parts there, because a policy generates a turn after complete tokens.
        """
        cuts = [cut for turn in rendered.turns for cut in (turn.begin, turn.end)]
        parts = self._encode_between(rendered.text, cuts, marks)
        for number, turn in enumerate(rendered.turns):
            if turn.resumes is not None:
                parts[2 * number + 1].append(self._end)
                del parts[2 * number + 2][: int(turn.resumes > turn.end)]
        kept = parts if self._loss == "all" else parts[:-1]
        pieces = list[_Piece]()
        for number, tokens in enumerate(kept):
            is_trained = bool(number % 2)
            if tokens and pieces and pieces[-1].is_trained == is_trained:
                pieces[-1] = _Piece([*pieces[-1].tokens, *tokens], is_trained)
            elif tokens:
                pieces.append(_Piece(tokens, is_trained))
        return pieces

    def _encode_between(self, text: str, cuts: Sequence[int], marks: Marks | None) -> list[list[int]]:
        """Return the tokens of a text in parts that are separated at the character indices `cuts`, which are in
        ascending order."""
        tokens, places = self._encode_with_cuts(text, cuts, marks)
        if len(places) == len(cuts):
            return [tokens[begin:end] for begin, end in pairwise([0, *places, len(tokens)])]
        crossed, rest = cuts[len(places)], cuts[len(places) + 1 :]  # a token crosses this cut
        before = self._encode_between(text[:crossed], cuts[: len(places)], marks)
        return before + self._encode_between(text[crossed:], [cut - crossed for cut in rest], marks)

    def _encode_with_cuts(self, text: str, cuts: Sequence[int], marks: Marks | None) -> tuple[list[int], list[int]]:
        """Return the tokens of a text, and the number of tokens before each character index in `cuts`, up to the first
        index that is inside a token."""
        places = list[int]()
        if marks is not None and marks.occur_in(marks.decode(text)):
            heads = [text[:cut] for cut in cuts]
            tokens, *prefixes = self._control.encode([text, *heads], marks, add_special_tokens=False)
            for prefix in prefixes:
                if tokens[: len(prefix)] != prefix:
                    break
                places.append(len(prefix))
            return tokens, places
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets, at = encoding["offset_mapping"], 0
        for cut in cuts:
            while at < len(offsets) and offsets[at][1] <= cut:
                at += 1
            # some tokenizers leave white space at the begin of a token out of its offsets
            starts_before = at < len(offsets) and (offsets[at][0] < cut or offsets[at - 1][1] < cut if at else cut > 0)
            if starts_before:
                break
            places.append(at)
        return encoding["input_ids"], places
