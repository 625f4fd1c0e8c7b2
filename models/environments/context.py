"""Context before each turn of an episode, and the check whether another turn fits. Torch-free.

A draft is a completion in progress (`PartialCompletion`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from models.config.environments import EpisodeSettings
from models.data.problems import Message
from models.engines.protocol import Request
from models.records.seeds import derive_seed
from models.rollouts.groups import ChatMessage, Group, PartialCompletion
from models.text.calls import ParsedTurn
from models.text.per_turn import Exchange, encode_turn, render_prompt, renders_calls
from models.text.turns import TurnFormat


class ContextBuilder(Protocol):
    """Strategy that builds the context for the next turn of an episode."""

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Encode a turn for the context of later turns. `text` is the unparsed text of the turn."""
        ...

    def append_context(
        self, draft: PartialCompletion, chat: Sequence[ChatMessage], exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the context for the next turn to the draft.

        `chat` is the prompt, and `exchanges` are the turns and answers of this iteration. Returns None if no room is
        left for a turn. Raises ValueError if the chat template rejects the messages.
        """
        ...

    def build_requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Build the requests for the next turns of a group, with the draft indices that each request serves.

        `budgets` is the maximum number of tokens for each draft.
        """
        ...


@dataclass(frozen=True, slots=True)
class StreamContext:
    """Context builder in which turns and observations follow each other in one token sequence."""

    form: TurnFormat
    max_new_tokens: int

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Return an empty encoding, because this history never renders earlier turns again."""
        return {}

    def append_context(
        self, draft: PartialCompletion, chat: Sequence[ChatMessage], exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the last observation. Returns None if no room is left for a turn."""
        tokens = self.form.encode_observation(
            exchanges[-1].observations, ended=int(draft.input.tokens[-1]) in self.form.ends
        )
        return (
            draft.append_observation(tokens)
            if draft.input.num_completion_tokens + len(tokens) < self.max_new_tokens
            else None
        )

    def build_requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Build one request for each distinct budget."""
        alike: dict[int, list[int]] = {}
        for index, budget in enumerate(budgets):
            alike.setdefault(budget, []).append(index)
        return [(_request(group, [drafts[index] for index in each], budget), each) for budget, each in alike.items()]


def _request(group: Group, drafts: Sequence[PartialCompletion], budget: int) -> Request:
    """Build a request that continues the drafts after their tokens so far."""
    return Request(
        row=group.prompt_row,
        inputs=tuple(draft.input for draft in drafts),
        seeds=tuple(draft.seed for draft in drafts),
        budget=budget,
    )


@dataclass(frozen=True, slots=True)
class PerTurnContext:
    """Context builder in which each turn gets a separate prompt: the chat so far, rendered by the chat template."""

    form: TurnFormat
    max_new_tokens: int
    in_calls: bool
    """Whether the template renders tool calls separately from the text of a turn."""

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Encode the turn as a message of the chat template."""
        return encode_turn(self.form, turn, text, in_calls=self.in_calls)

    def append_context(
        self, draft: PartialCompletion, chat: Sequence[ChatMessage], exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the prompt of the next turn. Returns None if the prompt leaves no room for a turn."""
        messages = [Message(each["role"], each["content"], each["name"] or "") for each in chat]
        tokens = render_prompt(self.form, messages, exchanges, prompt=draft.input.prompt.tolist())
        if len(tokens) - draft.input.num_prompt_tokens >= self.max_new_tokens:
            return None
        return draft.append_turn_prompt(
            tokens, "\n".join(["", *(message.text for message in exchanges[-1].observations), ""])
        )

    def build_requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Build one request for each distinct prompt and budget. The seed depends on the sample and the turn."""
        alike: dict[tuple[bytes, int], list[int]] = {}
        for index, (draft, budget) in enumerate(zip(drafts, budgets, strict=True)):
            alike.setdefault((draft.input.last_context().tokens.tobytes(), budget), []).append(index)
        return [
            (self._request(group, [drafts[index] for index in members], budget), members)
            for (_, budget), members in alike.items()
        ]

    def _request(self, group: Group, drafts: Sequence[PartialCompletion], budget: int) -> Request:
        """Build a request for turns after the drafts' last prompts, limited by the budget and the room left."""
        inputs = tuple(draft.input.last_context() for draft in drafts)
        room = self.max_new_tokens - (len(inputs[0]) - drafts[0].input.num_prompt_tokens)
        return Request(
            row=group.prompt_row,
            inputs=inputs,
            seeds=tuple(_own_seed(draft, len(draft.turns)) for draft in drafts),
            max_tokens=min(budget, room),
        )


def _own_seed(draft: PartialCompletion, turn: int) -> int:
    """Return the sampling seed of a turn in the history `PerTurnContext`."""
    return derive_seed("turn", draft.seed, turn)


def turn_seeds(draft: PartialCompletion) -> list[int]:
    """Return the seeds that any history uses for the draft's turns and for the turn after them."""
    return [draft.seed, *(_own_seed(draft, turn) for turn in range(len(draft.turns) + 1))]


def build_context_builder(settings: EpisodeSettings, form: TurnFormat, max_new_tokens: int) -> ContextBuilder:
    """Return the configured history."""
    if settings.has_turn_prompts:
        return PerTurnContext(form, max_new_tokens, in_calls=renders_calls(form))
    return StreamContext(form, max_new_tokens)
