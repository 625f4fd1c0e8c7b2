"""Encoding of texts as model inputs: examples to train on, texts to score, and pairs of completions. Torch-free."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from transformers import PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.texts import TextRules
from rheostat.models.data.examples import Example
from rheostat.models.data.preferences import Preference
from rheostat.models.data.problems import NO_ARGUMENTS, Message, TemplateArguments
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.chats import TemplateFailed, render_chats
from rheostat.models.text.control_tokens import ControlTokens, Marks
from rheostat.models.text.message_completions import WrittenCompletion, write_completion
from rheostat.models.text.message_texts import as_message
from rheostat.models.text.template_fields import fit_chats
from rheostat.models.text.tokenizer import render, tokenize_prompts
from rheostat.models.text.turn_end import TurnEnd, find_turn_end
from rheostat.models.vision.processor import VisionProcessor

_FIELD: Final = re.compile(r"\{(prompt|completion)\}")


@dataclass(frozen=True, slots=True)
class SequencePair:
    """Model inputs of a preference pair: the prompt with the better completion, and with the worse one. A completion
    with a label has only one of the two, and the other one is an empty input."""

    chosen: ModelInput
    rejected: ModelInput

    @property
    def size(self) -> int:
        """Number of tokens of the pair's sequences in a forward pass, including padding."""
        lengths = [len(each) for each in (self.chosen, self.rejected) if each]
        return len(lengths) * max(lengths)


def mismatch_pairs(pairs: Sequence[SequencePair], *, context: int) -> list[SequencePair]:
    """Combine the prompt of each pair with the completions of the next pair, and the last prompt with the completions
    of the first pair. Completions with labels are combined in the same way, whatever their labels. Completions are cut
    so that no sequence has more than `context` tokens. Policies that are trained with KTO estimate their KL divergence
    from the reference on these sequences (arXiv 2402.01306, section 4.1)."""

    def combine(prompt: ModelInput, other: ModelInput) -> ModelInput:
        if not prompt:
            return prompt
        tokens = other.completion[: context - prompt.num_prompt_tokens]
        return ModelInput.from_prompt(prompt.prompt, prompt.images).append_completion(tokens)

    return [
        SequencePair(
            combine(pair.chosen, other.chosen or other.rejected), combine(pair.rejected, other.rejected or other.chosen)
        )
        for pair, other in zip(pairs, [*pairs[1:], *pairs[:1]], strict=True)
    ]


def example_inputs(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    *,
    source: str,
    processor: VisionProcessor | None = None,
    rules: TextRules = TextRules(),  # noqa: B008 -- immutable
    ends: Collection[int] = (),
) -> list[ModelInput]:
    """Tokenize training examples: prompts as for generation, completions with their end token. `source` is the origin
    of the examples in messages, and `ends` are the tokens that end a completion according to the generation config.
    Raises BadInput if a prompt cannot be tokenized.

    Equal texts are tokenized once. Completions of plain-text prompts end with EOS. Completions of chats end as the chat
    template ends a turn of the assistant, if `rules` say so.
    """
    distinct_prompts = list(dict.fromkeys((each.prompt, each.images, each.template) for each in examples))
    tokenized = tokenize_prompts(
        [prompt for prompt, _, _ in distinct_prompts],
        tokenizer,
        sources=[source] * len(distinct_prompts),
        images=[images for _, images, _ in distinct_prompts],
        processor=processor,
        arguments=[arguments for _, _, arguments in distinct_prompts],
        rules=rules,
    )
    inputs = {each: each_input.input for each, each_input in zip(distinct_prompts, tokenized, strict=True)}
    in_chat = rules.ends_as_template and any(not isinstance(each.prompt, str) for each in examples)
    turn_end = find_turn_end(tokenizer, stated=ends) if in_chat else None
    plain_end = TurnEnd("", int(tokenizer.eos_token_id))
    texts = sorted({text for each in examples for text in _texts_of(each, turn_end)})
    if rules.parses_control_tokens:
        joined = [text + closing for text, closing in texts]
        encoded = tokenizer(joined, add_special_tokens=False)["input_ids"]
    else:
        images_of = [] if processor is None else [processor.placeholder]
        encoded = ControlTokens.of(tokenizer, images=images_of).encode_completions(texts)
    tokens = dict(zip(texts, encoded, strict=True))
    return [
        _build_input(
            inputs[each.prompt, each.images, each.template],
            each,
            tokens,
            end=plain_end if turn_end is None or isinstance(each.prompt, str) else turn_end,
        )
        for each in examples
    ]


def _texts_of(example: Example, end: TurnEnd | None) -> Iterator[tuple[str, str]]:
    """Yield the texts of a training example that are trained on, each with the text that the chat template writes after
    it."""
    closing = "" if end is None or isinstance(example.prompt, str) else end.text
    yield example.completion, "" if example.verdict else closing
    yield example.verdict, closing if example.verdict else ""
    for number, text in enumerate(example.continuation):
        yield text, closing if number % 2 else ""


def _build_input(
    model_input: ModelInput, example: Example, tokens: Mapping[tuple[str, str], list[int]], *, end: TurnEnd
) -> ModelInput:
    """Return the model input of a training example: its prompt, followed by completion and verdict, or by turns and
    observations. `tokens` contains the encoded texts."""
    if example.verdict:
        return model_input.append_completion(tokens[example.completion, ""]).append_completion(
            [*tokens[example.verdict, end.text], end.token]
        )
    model_input = model_input.append_completion([*tokens[example.completion, end.text], end.token])
    for observation, turn in zip(example.continuation[::2], example.continuation[1::2], strict=True):
        model_input = model_input.append_observation(tokens[observation, ""]).append_completion(
            [*tokens[turn, end.text], end.token]
        )
    return model_input


def require_completion(template: str | None, *, source: str) -> None:
    """Raise BadInput if a prompt template is given that does not contain the field `{completion}`. `source` is the
    beginning of the message."""
    if template is not None and "completion" not in _FIELD.findall(template):
        raise BadInput(
            f"{source}: the template {template!r} does not contain {{completion}}, so the scores of all completions "
            "would be the same. Add {completion} to the template."
        )


def encode(
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    *,
    prompt: str,
    completion: str,
    messages: Sequence[Message] = (),
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> ModelInput:
    """Encode a prompt and its completion as the input of a reward model. Uses `template` if it is given, else the
    tokenizer's chat template, else the plain concatenation. Raises ValueError if the chat template rejects the chat, or
    if there are no messages and the completion contains a special token as text.

    With `messages`, the messages of the prompt, control tokens in them and special tokens in the completion are
    ordinary text, and the chat template receives the messages and `arguments`. Without messages, the chat template
    receives the prompt as a user message, and control tokens in it become control tokens. Braces in the prompt or
    completion are never treated as fields.
    """
    control, chat = ControlTokens.of(tokenizer), (*messages, Message("assistant", completion))
    given = arguments if messages else NO_ARGUMENTS
    if not messages:
        forged = [token for token in tokenizer.all_special_tokens if token in completion]
        if forged:  # the text would become the token, so a policy could end its turn and start another
            raise ValueError(
                f"the completion contains the special token {forged[0]!r} as text, with which a policy could forge "
                "the end of its turn, so it is not scored"
            )
        chat = (Message("user", prompt), *chat)
    marks = None
    if messages:
        marks = control.choose_marks([prompt, chat, (as_message(given),)], others=[template or ""])
    if template is not None or not tokenizer.chat_template:
        texts = {"prompt": prompt, "completion": completion}
        if marks is not None:
            texts["prompt"] = _mark_rendered(control, prompt, messages, marks)
            texts["completion"] = control.mark_text(completion, marks, tokens=control.special)
        filled = _FIELD.sub(lambda field: texts[field[1]], "{prompt}{completion}" if template is None else template)
        return ModelInput.from_prompt(control.encode([filled], marks, add_special_tokens=True)[0])
    marked = chat if marks is None else control.mark_prompt(chat, marks)
    given = given if marks is None else control.mark_arguments(given, marks)
    encoded = [each.encode() for each in marked if isinstance(each, Message)]
    [turns] = fit_chats([encoded], tokenizer, [given])
    try:
        [text] = render_chats([turns], tokenizer, generation_prompt=False, tools=given.tools, kwargs=given.kwargs)
    except TemplateFailed as error:
        raise ValueError(f"the chat template {error}") from error
    return ModelInput.from_prompt(control.encode([text], marks, add_special_tokens=False)[0])


def _mark_rendered(control: ControlTokens, prompt: str, messages: Sequence[Message], marks: Marks) -> str:
    """Return a rendered prompt in which the control tokens that come from its messages are marked as ordinary text.
    Control tokens that the policy's chat template wrote are not marked. If a message with control tokens does not occur
    literally in the rendered prompt, all control tokens of the prompt are marked."""
    if [(each.role, each.content) for each in messages] == [("user", prompt)]:
        return control.mark_text(prompt, marks)
    for tokens, text in sorted(control.texts_of(tuple(messages)), key=lambda each: len(each[1]), reverse=True):
        marked = control.mark_text(text, marks, tokens=tokens)
        if marked == text:
            continue
        forms = [(change(text), change(marked)) for change in (str, str.strip, _encode_text)]
        found = next((form for form in forms if form[0] in prompt), None)
        if found is not None:
            prompt = prompt.replace(*found)
        elif not any(form in prompt for _, form in forms):
            return control.mark_text(prompt, marks)
    return prompt


def _encode_text(text: str) -> str:
    """Return a text as JSON without the quotes, which is how it occurs in prompts that templates write as JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def policy_pairs(
    preferences: Sequence[Preference],
    tokenizer: PreTrainedTokenizerFast,
    *,
    context: int,
    rules: TextRules = TextRules(),  # noqa: B008 -- immutable
    ends: Collection[int] = (),
    drop_long: bool = False,
) -> list[SequencePair]:
    """Tokenize preference pairs for training a policy, like training examples (`example_inputs`). `ends` are
    the tokens that end a completion according to the generation config. If a sequence exceeds `context` tokens, its
    pair is left out with `drop_long`. Without `drop_long`, BadInput is raised."""
    source = f"preferences from {preferences[0].source}" if preferences else "preferences"
    examples = [
        Example(pair.prompt, text, template=pair.template) for pair in preferences for text, _ in pair.completions
    ]
    inputs = example_inputs(examples, tokenizer, source=source, rules=rules, ends=ends)
    messages = [(pair, message) for pair in preferences for _, message in pair.completions]
    for row, (pair, message) in enumerate(messages):
        if message is not None:
            completion = _write_completion(pair, message, tokenizer, rules=rules, ends=ends)
            inputs[row] = ModelInput.from_prompt(inputs[row].prompt).append_completion(completion.tokens)
    return _build_pairs(preferences, inputs, context=context, drop_long=drop_long)


def _write_completion(
    pair: Preference,
    message: Message,
    tokenizer: PreTrainedTokenizerFast,
    *,
    rules: TextRules,
    ends: Collection[int] = (),
) -> WrittenCompletion:
    """Return the text and tokens of one completion of a preference pair that is given as a message. Raises BadInput,
    which names the row, if the chat template does not render the message."""
    assert not isinstance(pair.prompt, str), "only pairs of chats have messages as completions"
    try:
        return write_completion(pair.prompt, message, tokenizer, arguments=pair.template, rules=rules, ends=ends)
    except BadInput as error:
        raise BadInput(f"{pair.source}: {error}") from error


def reward_pairs(
    preferences: Sequence[Preference],
    tokenizer: PreTrainedTokenizerFast,
    *,
    template: str | None,
    context: int,
    chat_prompt: Literal["messages", "text"] = "text",
    drop_long: bool = False,
) -> list[SequencePair]:
    """Tokenize preference pairs for training a reward model, whose score is computed at the last token that is not
    padding. Raises BadInput if the template does not contain the completion, or if a text cannot be encoded or exceeds
    `context` tokens. With `drop_long`, pairs that exceed `context` tokens are left out.

    `chat_prompt` selects whether the chat template receives the prompt of a chat as its messages or as text.
    """
    require_completion(template, source="reward model")
    inputs: list[ModelInput] = []
    prompts = render(
        [pair.prompt for pair in preferences],
        tokenizer,
        sources=[pair.source for pair in preferences],
        arguments=[pair.template for pair in preferences],
    )
    for pair, prompt in zip(preferences, prompts, strict=True):
        messages = (Message("user", pair.prompt),) if isinstance(pair.prompt, str) else pair.prompt
        messages, arguments = ((), NO_ARGUMENTS) if chat_prompt == "text" else (messages, pair.template)
        for text, message in pair.completions:
            completion = text
            if message is not None:
                completion = _write_completion(pair, message, tokenizer, rules=TextRules()).text
            try:
                model_input = encode(
                    tokenizer, template, prompt=prompt, completion=completion, messages=messages, arguments=arguments
                )
            except ValueError as error:
                raise BadInput(f"{pair.source}: {error}") from error
            inputs.append(_mark_last_token(model_input, tokenizer.pad_token_id))
    return _build_pairs(preferences, inputs, context=context + 1, drop_long=drop_long)


def _mark_last_token(model_input: ModelInput, pad: int | None) -> ModelInput:
    """Return the input cut after its last token that is not `pad`, which is where the score is computed. Model outputs
    are read at the positions that predict completion tokens, so an arbitrary token (0) is appended as the completion.
    """
    tokens = model_input.tokens
    end = len(tokens)
    while end and tokens[end - 1] == pad:
        end -= 1
    return ModelInput.from_prompt(tokens[:end]).append_completion([0])


def _build_pairs(
    preferences: Sequence[Preference], inputs: Sequence[ModelInput], *, context: int, drop_long: bool
) -> list[SequencePair]:
    """Combine model inputs, one for each completion of each preference, into pairs. With `drop_long`, pairs with an
    input of more than `context` tokens are left out. Raises BadInput if an input is empty or too long, or if no pair
    remains."""
    pairs, remaining = list[SequencePair](), iter(inputs)
    for pair in preferences:
        chosen, rejected = (ModelInput() if pair.label is is_chosen else next(remaining) for is_chosen in (False, True))
        if drop_long and max(len(chosen), len(rejected)) > context:
            continue
        for name, each in (("chosen", chosen), ("rejected", rejected)):
            if pair.label is (name == "rejected"):
                continue
            length = len(each)
            if not 0 < each.num_prompt_tokens < length <= context:
                completion, item = (f"{name} completion", "pair") if pair.label is None else ("completion", "row")
                raise BadInput(
                    f"{pair.source}: the prompt and the {completion} have {format_count(length, 'token')} together, "
                    f"but the context of the model is only {format_count(context, 'token')}. Shorten or remove the "
                    f"{item}"
                )
        pairs.append(SequencePair(chosen, rejected))
    if preferences and not pairs:
        noun = "pair" if preferences[0].label is None else "completion"
        raise BadInput(
            f"preferences.drop with 'too_long' leaves no {noun}: all {len(preferences)} {noun}s from "
            f"{preferences[0].source} have more than {context} tokens, the model's context."
        )
    return pairs
