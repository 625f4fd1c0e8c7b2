"""Context before each turn of an episode, and the check whether another turn fits. Does not import torch.

A draft is a completion in progress (`PartialCompletion`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rheostat.models.config.episodes import SteppedEnvironment
from rheostat.models.engines.protocol import Request
from rheostat.models.records.seeds import derive_seed
from rheostat.models.rollouts.groups import Group, PartialCompletion
from rheostat.models.text.calls import ParsedTurn
from rheostat.models.text.per_turn import Exchange, encode_turn, render_prompt, renders_calls
from rheostat.models.text.turns import TurnFormat


class ContextBuilder(Protocol):
    """Strategy that builds the tokens that the policy reads before each turn of an episode. `StreamContext` appends to
    one token sequence, and `PerTurnContext` renders a separate prompt for each turn."""

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Return a finished turn as a message of the chat template, from which later prompts are rendered. `text` is
        the turn's text before parsing.

        Returns an empty dict if earlier turns are never rendered again.
        """
        ...

    def append_context(
        self, draft: PartialCompletion, group: Group, exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the context of the next turn to an unfinished episode, and return the result.

        `draft` is the episode so far, `group` contains its prompt, and `exchanges` are the turns and answers since the
        episode began or was resumed. Returns None if no room is left for a turn. Raises ValueError if the chat template
        rejects the messages.
        """
        ...

    def build_requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Build the requests to the engine for the next turns of a group's episodes. Each request is paired with the
        indices of the drafts (episodes so far) that it continues.

        `budgets` is the maximum number of tokens for each draft.
        """
        ...


@dataclass(frozen=True, slots=True)
class StreamContext:
    """Context builder in which turns and observations (the environment's answers) follow each other in one token
    sequence."""

    form: TurnFormat
    max_new_tokens: int

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Return an empty dict, because earlier turns stay in the token sequence and are never rendered again."""
        return {}

    def append_context(
        self, draft: PartialCompletion, group: Group, exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the environment's last answer (observation) to the token sequence. Returns None if no turn fits after
        it."""
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
        """Build one request to the engine for all drafts (unfinished episodes) with the same budget of tokens."""
        alike: dict[int, list[int]] = {}
        for index, budget in enumerate(budgets):
            alike.setdefault(budget, []).append(index)
        return [(_request(group, [drafts[index] for index in each], budget), each) for budget, each in alike.items()]


def _request(group: Group, drafts: Sequence[PartialCompletion], budget: int) -> Request:
    """Build a request to the engine that continues drafts (unfinished episodes) after their last token."""
    return Request(
        row=group.prompt_row,
        inputs=tuple(draft.input for draft in drafts),
        seeds=tuple(draft.seed for draft in drafts),
        budget=budget,
    )


@dataclass(frozen=True, slots=True)
class PerTurnContext:
    """Context builder in which each turn gets a separate prompt: the whole chat so far, rendered by the chat
    template."""

    form: TurnFormat
    max_new_tokens: int
    in_calls: bool
    """Whether the chat template renders tool calls from a separate message field, not from the turn's text."""

    def encode_turn(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Return a finished turn as a message of the chat template. `text` is the turn's text before parsing."""
        return encode_turn(self.form, turn, text, in_calls=self.in_calls)

    def append_context(
        self, draft: PartialCompletion, group: Group, exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Render the whole chat so far, and append it to the draft (unfinished episode) as the prompt of the next turn.

        Returns None if no turn fits after the prompt.
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
        """Build one request to the engine for all drafts (unfinished episodes) with the same prompt and budget. The
        sampling seed of each draft depends on its sample and its turn."""
        alike: dict[tuple[bytes, int], list[int]] = {}
        for index, (draft, budget) in enumerate(zip(drafts, budgets, strict=True)):
            alike.setdefault((draft.input.last_context().tokens.tobytes(), budget), []).append(index)
        return [
            (self._request(group, [drafts[index] for index in members], budget), members)
            for (_, budget), members in alike.items()
        ]

    def _request(self, group: Group, drafts: Sequence[PartialCompletion], budget: int) -> Request:
        """Build a request to the engine for the next turns of drafts (unfinished episodes) whose last prompts are
        equal.

        The length of a turn is limited by the budget and by the room that the prompt leaves.
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
    """Return the sampling seed of turn number `turn`, for episodes in which each turn has a separate prompt
    (`PerTurnContext`)."""
    return derive_seed("turn", draft.seed, turn)


def turn_seeds(draft: PartialCompletion) -> list[int]:
    """Return all seeds that requests for the turns of this episode may contain, including its next turn.

    A replay uses these seeds to find the stored episode to which a request belongs.
    """
    return [draft.seed, *(_own_seed(draft, turn) for turn in range(len(draft.turns) + 1))]


def build_context_builder(settings: SteppedEnvironment, form: TurnFormat, max_new_tokens: int) -> ContextBuilder:
    """Build the context builder that `settings.history` selects. `form` is the policy's format of turns."""
    if settings.has_turn_prompts:
        return PerTurnContext(form, max_new_tokens, in_calls=renders_calls(form))
    return StreamContext(form, max_new_tokens)
