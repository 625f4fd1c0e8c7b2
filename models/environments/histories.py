"""What the policy reads before each turn of an episode, and where an episode is too long for another. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from models.config.environments import EpisodeSettings
from models.data.problems import Message
from models.engines.protocol import Request
from models.records.seeds import derive_seed
from models.rollouts.groups import ChatMessage, Group, PartialCompletion
from models.text.calls import ParsedTurn
from models.text.own_prompts import Exchange, prompt_of, spelt_turn, takes_calls
from models.text.turns import TurnFormat


class History(Protocol):
    """What of an episode stands before its next turn."""

    def spelt(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Spell a turn of which this is the whole text, for what comes before later ones."""
        ...

    def followed(
        self, draft: PartialCompletion, chat: Sequence[ChatMessage], exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append what the next turn is written after, given the prompt's messages and all that was said since; none
        where no room is left for a turn. Raises ValueError where the template refuses it.
        """
        ...

    def requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Ask for so many tokens of a turn of each draft of a group, by their index here."""
        ...


@dataclass(frozen=True, slots=True)
class OneStream:
    """Turns and observations follow each other in one sequence."""

    form: TurnFormat
    max_new_tokens: int

    def spelt(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """Nobody reads it again."""
        return {}

    def followed(
        self, draft: PartialCompletion, chat: Sequence[ChatMessage], exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the last observation."""
        tokens = self.form.observation(exchanges[-1].said, ended=int(draft.input.tokens[-1]) in self.form.ends)
        return draft.answered(tokens) if draft.input.num_completion_tokens + len(tokens) < self.max_new_tokens else None

    def requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Ask for those together that have the same budget."""
        alike: dict[int, list[int]] = {}
        for index, budget in enumerate(budgets):
            alike.setdefault(budget, []).append(index)
        return [(_request(group, [drafts[index] for index in each], budget), each) for budget, each in alike.items()]


def _request(group: Group, drafts: Sequence[PartialCompletion], budget: int) -> Request:
    return Request(
        row=group.prompt_row,
        inputs=tuple(draft.input for draft in drafts),
        seeds=tuple(draft.seed for draft in drafts),
        budget=budget,
    )


@dataclass(frozen=True, slots=True)
class OwnPrompts:
    """Each turn is written after a prompt of its own: the chat so far, as the template writes it then."""

    form: TurnFormat
    max_new_tokens: int
    in_calls: bool
    """Whether the template takes calls apart from the text of a turn."""

    def spelt(self, turn: ParsedTurn, text: str) -> dict[str, object]:
        """As the template reads it."""
        return spelt_turn(self.form, turn, text, in_calls=self.in_calls)

    def followed(
        self, draft: PartialCompletion, chat: Sequence[ChatMessage], exchanges: Sequence[Exchange]
    ) -> PartialCompletion | None:
        """Append the prompt of the next turn."""
        asked = [Message(each["role"], each["content"], each["name"] or "") for each in chat]
        tokens = prompt_of(self.form, asked, exchanges)
        if len(tokens) - draft.input.num_prompt_tokens >= self.max_new_tokens:
            return None
        return draft.prompted(tokens, "\n".join(["", *(message.text for message in exchanges[-1].said), ""]))

    def requests(
        self, group: Group, drafts: Sequence[PartialCompletion], budgets: Sequence[int]
    ) -> list[tuple[Request, list[int]]]:
        """Ask for those together that have the same prompt; draws of a turn have a seed of their own."""
        alike: dict[tuple[bytes, int], list[int]] = {}
        for index, (draft, budget) in enumerate(zip(drafts, budgets, strict=True)):
            alike.setdefault((draft.input.last_given().tokens.tobytes(), budget), []).append(index)
        return [
            (self._request(group, [drafts[index] for index in members], budget), members)
            for (_, budget), members in alike.items()
        ]

    def _request(self, group: Group, drafts: Sequence[PartialCompletion], budget: int) -> Request:
        inputs = tuple(draft.input.last_given() for draft in drafts)
        room = self.max_new_tokens - (len(inputs[0]) - drafts[0].input.num_prompt_tokens)
        return Request(
            row=group.prompt_row,
            inputs=inputs,
            seeds=tuple(_own_seed(draft, len(draft.turns)) for draft in drafts),
            longest=min(budget, room),
        )


def _own_seed(draft: PartialCompletion, turn: int) -> int:
    return derive_seed("turn", draft.seed, turn)


def turn_seeds(draft: PartialCompletion) -> list[int]:
    """Seeds by which any history asks for one of the draft's turns, or for the one behind them."""
    return [draft.seed, *(_own_seed(draft, turn) for turn in range(len(draft.turns) + 1))]


def history_of(settings: EpisodeSettings, form: TurnFormat, max_new_tokens: int) -> History:
    """Make the one that is configured."""
    if settings.renders_turns:
        return OwnPrompts(form, max_new_tokens, in_calls=takes_calls(form))
    return OneStream(form, max_new_tokens)
