"""Context before each turn of an episode, and the check whether another turn fits. Does not import torch.

A draft is a completion in progress (`PartialCompletion`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from models.config.environments import EpisodeSettings
from models.engines.protocol import Request
from models.records.seeds import derive_seed
from models.rollouts.groups import Group, PartialCompletion
from models.text.calls import ParsedTurn
from models.text.per_turn import Exchange, encode_turn, render_prompt, renders_calls
from models.text.turns import TurnFormat


class ContextBuilder(Protocol):
    """Strategy that builds what the policy reads before each turn of an episode.

    `StreamContext` keeps one token sequence, `PerTurnContext` renders a separate prompt for each turn.
    """

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Return a finished turn as the message from which later prompts are rendered.

        `text` is the turn's text before parsing. The result is empty if prompts are not rendered again.
        """
        ...

    def append_context(
        self, draft: PartialCompletion, group: Group, exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Return the draft with the context for the next turn appended.

        `group` has the prompt, and `exchanges` are the turns and answers of this iteration. Returns None if no room is
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
        """Return an empty encoding, because earlier turns stay in the sequence and are never rendered again."""
        return {}

    def append_context(
        self, draft: PartialCompletion, group: Group, exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the environment's last observation to the token sequence. Returns None if no turn fits after it."""
        tokens = self.form.with_arguments(group.template).encode_observation(
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
        """Build one request for all drafts with the same budget, because a request has a single budget."""
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
    """Whether the chat template renders tool calls from a separate message field, not from the turn's text."""

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Encode the turn as a message of the chat template."""
        return encode_turn(self.form, turn, text, in_calls=self.in_calls)

    def append_context(
        self, draft: PartialCompletion, group: Group, exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Render the chat so far and append it as the prompt of the next turn.

        Returns None if no turn fits after it.
        """
        form, prompt = self.form.with_arguments(group.template), draft.input.prompt.tolist()
        tokens = render_prompt(form, group.messages, exchanges, prompt=prompt)
        if len(tokens) - draft.input.num_prompt_tokens >= self.max_new_tokens:
            return None
        return draft.append_turn_prompt(
            tokens, "\n".join(["", *(message.text for message in exchanges[-1].observations), ""])
        )

    def build_requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Build one request for all drafts with the same prompt and budget. Seeds depend on the sample and the turn."""
        alike: dict[tuple[bytes, int], list[int]] = {}
        for index, (draft, budget) in enumerate(zip(drafts, budgets, strict=True)):
            alike.setdefault((draft.input.last_context().tokens.tobytes(), budget), []).append(index)
        return [
            (self._request(group, [drafts[index] for index in members], budget), members)
            for (_, budget), members in alike.items()
        ]

    def _request(self, group: Group, drafts: Sequence[PartialCompletion], budget: int) -> Request:
        """Build a request for the next turns of drafts whose last prompts are equal.

        A turn is limited by the budget and by the room that the prompt leaves.
        """
        inputs = tuple(draft.input.last_context() for draft in drafts)
        room = self.max_new_tokens - (len(inputs[0]) - drafts[0].input.num_prompt_tokens)
        return Request(
            row=group.prompt_row,
            inputs=inputs,
            seeds=tuple(_own_seed(draft, len(draft.turns)) for draft in drafts),
            max_tokens=min(budget, room),
        )


def _own_seed(draft: PartialCompletion, turn: int) -> int:
    """Return the sampling seed of a turn if turns have separate prompts (`PerTurnContext`)."""
    return derive_seed("turn", draft.seed, turn)


def turn_seeds(draft: PartialCompletion) -> list[int]:
    """Return all seeds that a context builder may use for the draft's turns and its next turn.

    A replay finds the stored episode of a request by these seeds.
    """
    return [draft.seed, *(_own_seed(draft, turn) for turn in range(len(draft.turns) + 1))]


def build_context_builder(settings: EpisodeSettings, form: TurnFormat, max_new_tokens: int) -> ContextBuilder:
    """Build the context builder that `settings.history` selects, for turns in the format `form`."""
    if settings.has_turn_prompts:
        return PerTurnContext(form, max_new_tokens, in_calls=renders_calls(form))
    return StreamContext(form, max_new_tokens)
