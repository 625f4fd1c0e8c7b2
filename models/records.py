"""The nouns that every room speaks: what goes to a worker, what a shard's columns are.

Torch-free. Work records travel to workers by value; they carry references and counts, never payloads.
"""

from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa
from pydantic import JsonValue

from infra.bundles import BundleRef
from infra.shards import ShardRef


class FinishReason(StrEnum):
    """Why a completion ended: the policy stopped it, the length limit did, or this iteration's budget, for now."""

    STOP = "stop"
    LENGTH = "length"
    CUT = "cut"


PROMPT_SCHEMA = pa.schema(
    [
        ("prompt_id", pa.string()),  # stable name of the problem: the BLAKE3 of its text, 16 hex digits
        ("text", pa.string()),  # the rendered prompt, as the tokenizer saw it
        ("tokens", pa.list_(pa.int32())),
        ("answer", pa.string()),  # the reference answer, given to rewards
    ]
)
"""Prompts of a data set, one row each; a prompt's row number is its name inside a run."""

ROLLOUT_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),  # row in the prompts shard
        ("sample", pa.int16()),  # index of the completion inside its group
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion_tokens", pa.list_(pa.int32())),  # ends with EOS when finish_reason is stop
        (
            "logprobs",
            pa.list_(pa.float32()),
        ),  # behaviour log-probs, one per completion token
        ("finish_reason", pa.string()),
        ("seed", pa.uint64()),
        # Which policy versions wrote it, in order: more than one where it was continued in a later iteration.
        ("segments", pa.list_(pa.struct([("policy_version", pa.int32()), ("tokens", pa.int32())]))),
    ]
)
"""Completions, one row each, ordered by (prompt_row, sample)."""

SAMPLE_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),
        ("sample", pa.int16()),
        ("tokens", pa.list_(pa.int32())),  # prompt and completion; without completion the sample has no weight
        ("num_prompt_tokens", pa.int32()),
        ("logprobs", pa.list_(pa.float32())),  # behaviour log-probs, one per completion token
        ("advantages", pa.list_(pa.float32())),  # one per completion token
    ]
)
"""Training samples, one row each: all that the update reads."""


VERDICT_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),  # -1 for a canary
        ("sample", pa.int16()),  # number of the canary in its shard
        ("vote", pa.int16()),
        ("attempt", pa.int16()),  # 0 is the first; only the last attempt of a vote counts
        ("text", pa.string()),  # the judge's answer, shortened where it is very long; null where nothing is written
        ("value", pa.float64()),  # the reward; null = invalid
        ("error", pa.string()),  # why it is invalid
        ("tokens", pa.int32()),  # of the answer
    ]
)
"""Answers of a served reward, one row per vote and attempt, ordered by (prompt_row, sample, vote, attempt)."""


def score_schema(terms: tuple[str, ...]) -> pa.Schema:
    """Columns of a score shard: the total reward (null = missing), one column per term, and the first error."""
    return pa.schema(
        [
            ("prompt_row", pa.int32()),
            ("sample", pa.int16()),
            ("reward", pa.float64()),
            *((f"reward_{term}", pa.float64()) for term in terms),
            ("error", pa.string()),
        ]
    )


@dataclass(frozen=True, slots=True)
class PolicyVersion:
    """A policy after `version` updates: immutable weights, and the optimizer state beside them (none at the start)."""

    version: int
    weights: BundleRef
    state: BundleRef | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker hands back: references and numbers.

    `metrics` are functions of the inputs alone and enter the manifest's digest; `timings` (seconds) do not.
    """

    shards: tuple[ShardRef, ...] = ()
    policy: PolicyVersion | None = None
    metrics: dict[str, float] | None = None
    detail: dict[str, JsonValue] | None = None
    """Other facts that follow from the inputs alone: names and row numbers, never payloads."""
    timings: dict[str, float] | None = None
