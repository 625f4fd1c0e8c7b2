"""Groups of completions in progress. A group may start in one iteration and end in a later one. Torch-free."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import JsonValue

from rheostat.models.config.rollout import PartialRollout
from rheostat.models.data.problems import NO_ARGUMENTS, Message, TemplateArguments, decode_template_input
from rheostat.models.engines.protocol import Completion, Request
from rheostat.models.records.model_input import (
    ENVIRONMENT,
    TURN_PROMPT,
    ModelInput,
    prompt_inputs,
    rollout_columns,
    rollout_inputs,
)
from rheostat.models.records.pictures import Picture
from rheostat.models.records.schemas import EXPERTS, ROLLOUT_SCHEMA, TEMPLATE, FinishReason
from rheostat.models.records.seeds import sample_seed


@dataclass(frozen=True, slots=True)
class Segment:
    """Run of consecutive tokens of a completion that the same policy version generated."""

    policy_version: int
    tokens: int


class ChatMessage(TypedDict):
    """Message of a chat or an episode, in the format of rollout shards."""

    role: str
    content: str
    name: str | None


def store_messages(messages: Iterable[Message]) -> tuple[ChatMessage, ...]:
    """Convert messages to the format in which rollouts store them."""
    return tuple(ChatMessage(role=each.role, content=each.text, name=each.name or None) for each in messages)


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of an episode: its lengths, its tool calls, and the reply of the environment."""

    tokens: int
    """Number of tokens that the policy generated in this turn."""
    observation: int = 0
    """Number of tokens between this turn and the next: the environment's reply (observation), or the separate prompt of
    the next turn."""
    calls: int = 0
    """Number of tool calls that the policy made in this turn."""
    errors: int = 0
    """Number of tool calls in this turn that could not be parsed."""
    reward: float | None = None
    """Reward that the environment returned for this turn, or None if it returned none."""
    error: str | None = None
    """Error message if the environment failed in this turn, or None."""
    order: int | None = None
    """Number of the request of this turn in the order in which an agent's requests were accepted, starting with 0. None
    if the episode is not an agent's. Its turns are then stored in order of time."""
    parent: int | None = None
    """Order of the turn whose tokens this turn continues, or None if the turn starts with a fresh prompt."""
    replayed: bool | None = None
    """Whether this turn was recorded before a restart of the agent and returned to the agent again. None if the episode
    is not an agent's."""
    finish_reason: FinishReason | None = None
    """Reason why the turn of an agent ended. `cut` if it is unfinished. None if the episode is not an agent's."""
    text: str | None = None
    """Text of an agent's turn without its tool calls. None if the episode is not an agent's. Its text is then in the
    messages."""


@dataclass(frozen=True, slots=True)
class PartialCompletion:
    """Completion as generated so far. Its finish reason is `cut` if it is unfinished and continues later."""

    seed: int
    input: ModelInput
    """Model input: tokens and images of the prompt, and the tokens of the completion so far."""
    logprobs: tuple[float, ...] = ()
    """Log-prob of each completion token under the policy version that generated it. 0 for tokens that no policy
    generated."""
    text: str = ""
    finish_reason: FinishReason = FinishReason.CUT
    segments: tuple[Segment, ...] = ()
    turns: tuple[TurnRecord, ...] = ()
    """Finished turns of an episode, or an empty tuple if the completion is not an episode."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages of an episode after the prompt: the policy's turns and the observations, in order."""
    picture: Picture | None = None
    """Generated picture of a text-to-image policy. A table stores only its digest."""

    def append_completion(self, completion: Completion, version: int) -> "PartialCompletion":
        """Return this completion with the output of policy version `version` appended: tokens or a picture. Expert
        choices that were recorded for earlier tokens are kept."""
        model_input, picture = self.input.append_completion(completion.tokens), completion.picture
        if completion.experts is not None:
            before = completion.experts[:0] if self.input.experts is None else self.input.experts
            model_input = model_input.with_experts(np.concatenate([before, completion.experts[len(before) :]]))
        return replace(
            self,
            input=model_input if picture is None else replace(model_input, images=(picture.digest,)),
            picture=picture,
            logprobs=self.logprobs + completion.logprobs,
            text=self.text + completion.text if self.has_fresh_context else completion.text,
            finish_reason=completion.finish_reason,
            segments=(*self.segments, Segment(policy_version=version, tokens=len(completion.tokens))),
        )

    @property
    def num_generated(self) -> int:
        """Number of tokens that policies generated. The environment's replies and the separate prompts of turns are not
        counted."""
        return sum(segment.tokens for segment in self.segments if segment.policy_version >= 0)

    def count_tokens_of(self, version: int) -> int:
        """Return the number of tokens that policy version `version` generated."""
        return sum(segment.tokens for segment in self.segments if segment.policy_version == version)

    def find_first_version(self, version: int) -> int:
        """Return the policy version with which the completion began, or `version` if it has not begun."""
        versions = (segment.policy_version for segment in self.segments if segment.policy_version >= 0)
        return min(versions, default=version)

    @property
    def num_turn_tokens(self) -> int:
        """Number of tokens that were generated in the current, unfinished turn of an episode."""
        return len(self.logprobs) - sum(turn.tokens + turn.observation for turn in self.turns)

    def generated_turns(self) -> list[tuple[int, ...]]:
        """Return the tokens that policies generated in each turn of an episode.

        The last turn may be unfinished or empty.
        """
        completion = self.input.completion.tolist()
        begins = [0, *accumulate(turn.tokens + turn.observation for turn in self.turns)]
        lengths = [*(turn.tokens for turn in self.turns), self.num_turn_tokens]
        return [tuple(completion[at : at + length]) for at, length in zip(begins, lengths, strict=True)]

    @property
    def has_fresh_context(self) -> bool:
        """Whether the next turn of the episode starts from a separately rendered prompt instead of continuing the
        tokens so far."""
        return bool(self.segments) and self.segments[-1].policy_version == TURN_PROMPT

    def append_observation(self, tokens: Sequence[int]) -> "PartialCompletion":
        """Return this completion with an environment's reply (observation) appended, as tokens that are not trained
        on."""
        return self._append_context(tokens, ENVIRONMENT) if tokens else self

    def append_turn_prompt(self, tokens: Sequence[int], text: str) -> "PartialCompletion":
        """Return this completion with the separate prompt of the next turn appended. The policy then reads this prompt
        instead of all context before it. `text` is appended to the completion's text."""
        return replace(self._append_context(tokens, TURN_PROMPT), text=f"{self.text}{text}")

    def _append_context(self, tokens: Sequence[int], author: int) -> "PartialCompletion":
        """Return this completion with tokens appended that no policy generated. `author` is a code for their origin,
        which is recorded in the segments."""
        return replace(
            self,
            input=self.input.append_observation(tokens),
            logprobs=self.logprobs + (0.0,) * len(tokens),
            segments=(*self.segments, Segment(policy_version=author, tokens=len(tokens))),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Prompt with the completions that are generated for it, sorted by their sample number."""

    prompt_row: int
    prompt_id: str
    prompt: str
    answer: str
    drafts: tuple[PartialCompletion, ...]
    columns: Mapping[str, JsonValue] = field(default_factory=dict)
    """Data columns of the problem that an environment receives in addition to the prompt and the answer."""
    chat: tuple[ChatMessage, ...] = ()
    """Messages with which an episode starts. A plain-text prompt is one message."""
    messages: tuple[Message, ...] = ()
    """Messages of the prompt with all fields that chat templates use, such as tool calls."""
    template: TemplateArguments = NO_ARGUMENTS
    """Arguments of the chat template, such as tools, if the prompt is a chat."""
    num_prompt_tokens: int = 0
    """Number of tokens of the rendered prompt."""

    @property
    def is_finished(self) -> bool:
        """Whether all completions of the group have ended, so that none continues later."""
        return all(draft.finish_reason is not FinishReason.CUT for draft in self.drafts)

    def build_request(self, version: int, partial: PartialRollout | None) -> Request:
        """Return a request to continue the unfinished completions with policy version `version`. `partial` contains the
        settings for interrupting long completions, or is None."""
        open_drafts = [draft for draft in self.drafts if draft.finish_reason is FinishReason.CUT]
        return Request(
            row=self.prompt_row,
            inputs=tuple(draft.input for draft in open_drafts),
            seeds=tuple(draft.seed for draft in open_drafts),
            budget=self.find_token_budget(version, partial),
        )

    def find_token_budget(self, version: int, partial: PartialRollout | None) -> int | None:
        """Return the maximum number of tokens that policy version `version` may add to a completion. Returns None (no
        limit) if `partial`, the settings for interrupting long completions, is None, or if the group has reached its
        maximum staleness."""
        first_version = min((draft.find_first_version(version) for draft in self.drafts), default=version)
        return partial.tokens if partial is not None and version - first_version < partial.max_staleness else None

    def append_completions(self, completions: Sequence[Completion], version: int) -> "Group":
        """Return the group with new output of policy version `version` appended to its unfinished completions, in
        order. Finished completions stay unchanged."""
        new_completions = iter(completions)
        drafts = tuple(
            draft.append_completion(next(new_completions), version)
            if draft.finish_reason is FinishReason.CUT
            else draft
            for draft in self.drafts
        )
        return replace(self, drafts=drafts)


def fresh_groups(prompts: pa.Table, rows: Sequence[int], *, group_size: int, seed: int, iteration: int) -> list[Group]:
    """Return a new group of `group_size` completions without tokens for each prompt of the table. `rows` contains the
    index of each prompt in its shard, from which the completions' seeds are derived."""
    return [
        replace(
            group,
            drafts=tuple(
                PartialCompletion(
                    seed=sample_seed(seed, iteration, prompt_row=group.prompt_row, sample=n), input=model_input
                )
                for n in range(group_size)
            ),
        )
        for group, model_input in zip(_without_drafts(prompts, rows), prompt_inputs(prompts), strict=True)
    ]


def read_groups(rollouts: pa.Table, prompts: pa.Table) -> list[Group]:
    """Return the groups in a rollout table. `prompts` must contain all prompts of their shard."""
    rows: list[_Row] = rollouts.select([*_Row.__annotations__]).to_pylist()
    members: dict[int, list[tuple[_Row, ModelInput]]] = {}
    for row, model_input in zip(rows, rollout_inputs(rollouts), strict=True):
        members.setdefault(row["prompt_row"], []).append((row, model_input))
    empty_groups = _without_drafts(prompts.take(pa.array([*members], pa.int64())), [*members])
    return [
        replace(group, drafts=tuple(_build_draft(*each, behind=len(group.chat)) for each in members[group.prompt_row]))
        for group in empty_groups
    ]


def _without_drafts(prompts: pa.Table, rows: Sequence[int]) -> list[Group]:
    """Return a group without completions for each prompt of the table. `rows` are the prompts' indices in their
    shard."""
    columns = ["prompt_id", "text", "answer", "columns", "messages", *({TEMPLATE} & {*prompts.column_names})]
    lengths = pc.list_value_length(prompts["tokens"]).to_pylist()
    groups = []
    for row, prompt, length in zip(rows, prompts.select(columns).to_pylist(), lengths, strict=True):
        chat = tuple(prompt["messages"] or [ChatMessage(role="user", content=prompt["text"], name=None)])
        messages, template = decode_template_input(prompt.get(TEMPLATE) or "")
        groups.append(
            Group(
                prompt_row=row,
                prompt_id=prompt["prompt_id"],
                prompt=prompt["text"],
                answer=prompt["answer"],
                columns=json.loads(prompt["columns"]),
                chat=chat,
                messages=messages or tuple(Message(each["role"], each["content"], each["name"] or "") for each in chat),
                template=template,
                num_prompt_tokens=length,
                drafts=(),
            )
        )
    return groups


def build_table(groups: Sequence[Group]) -> pa.Table:
    """Return groups as a rollout table with one row per completion, ordered by (prompt_row, sample)."""
    ordered = sorted(groups, key=lambda group: group.prompt_row)
    pairs = [(group, sample, draft) for group in ordered for sample, draft in enumerate(group.drafts)]
    columns = {
        "prompt_row": [group.prompt_row for group, _, _ in pairs],
        "sample": [sample for _, sample, _ in pairs],
        "prompt_id": [group.prompt_id for group, _, _ in pairs],
        "prompt": [group.prompt for group, _, _ in pairs],
        "completion": [draft.text for _, _, draft in pairs],
        "answer": [group.answer for group, _, _ in pairs],
        **rollout_columns([draft.input for _, _, draft in pairs]),
        "logprobs": [draft.logprobs for _, _, draft in pairs],
        "finish_reason": [draft.finish_reason.value for _, _, draft in pairs],
        "seed": [draft.seed for _, _, draft in pairs],
        "segments": [
            [{"policy_version": segment.policy_version, "tokens": segment.tokens} for segment in draft.segments]
            for _, _, draft in pairs
        ],
        "turns": [[asdict(turn) for turn in draft.turns] or None for _, _, draft in pairs],
        "messages": [
            [*group.chat, *draft.messages] if draft.turns or draft.messages else None for group, _, draft in pairs
        ],
    }
    optional = [pa.field(EXPERTS, columns[EXPERTS].type)] if EXPERTS in columns else []
    return pa.table(columns, schema=pa.schema([*ROLLOUT_SCHEMA, *optional]))


class _Row(TypedDict):
    """Row of a rollout shard. Token columns are left out, because they are read as model inputs."""

    prompt_row: int
    completion: str
    logprobs: list[float]
    finish_reason: str
    seed: int
    segments: list[dict[str, int]]
    turns: list[dict[str, Any]] | None
    messages: list[ChatMessage] | None


def _build_draft(row: _Row, read: ModelInput, *, behind: int) -> PartialCompletion:
    """Return the completion that a row of a rollout table describes. `read` is its model input. The first `behind`
    messages in the row belong to the prompt."""
    return PartialCompletion(
        seed=row["seed"],
        input=read,
        logprobs=tuple(row["logprobs"]),
        text=row["completion"],
        finish_reason=FinishReason(row["finish_reason"]),
        segments=tuple(Segment(**segment) for segment in row["segments"]),
        turns=tuple(TurnRecord(**turn) for turn in row["turns"] or ()),
        messages=tuple((row["messages"] or [])[behind:]),
    )
