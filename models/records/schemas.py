"""Schemas of the Arrow tables that stages exchange."""

from enum import StrEnum
from typing import Final

import pyarrow as pa

from infra.store.shards import ShardKind, declare_kinds


class FinishReason(StrEnum):
    """Why a completion ended: the policy stopped it, the length limit did, or this iteration's budget, for now.

    An episode also ends where its turns are used up, or its environment failed.
    """

    STOP = "stop"
    LENGTH = "length"
    CUT = "cut"
    TURNS = "turns"
    FAILED = "failed"


MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),  # text; images are left out
        ("name", pa.string()),  # of the tool that answers; null where none does
    ]
)
"""A message of a chat."""

PROMPT_SCHEMA = pa.schema(
    [
        (
            "prompt_id",
            pa.string(),
        ),  # stable name of the problem: the BLAKE3 of its text, images and columns, 16 hex digits
        ("text", pa.string()),  # the rendered prompt, as the tokenizer saw it
        ("tokens", pa.list_(pa.int32())),
        ("images", pa.list_(pa.string())),  # digests, in the order in which the tokens have places for them
        ("answer", pa.string()),  # the reference answer, given to rewards
        ("columns", pa.string()),  # what an environment is told beside prompt and answer, as a JSON object
        ("messages", pa.list_(MESSAGE)),  # of a chat, before its template; null where it is plain text
    ]
)
"""Prompts of a data set, one row each; a prompt's row number is its name inside a run."""

MEDIA_SCHEMA = pa.schema(
    [
        ("digest", pa.string()),  # BLAKE3 of the bytes, 64 hex digits
        ("format", pa.string()),  # as Pillow calls it: PNG, JPEG, ...
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("bytes", pa.large_binary()),  # as they came
    ]
)
"""Images of prompts, one row each, in order of their first use; each is in one media shard of a split."""

TURN = pa.struct(
    [
        ("tokens", pa.int32()),  # that the policy wrote
        ("observation", pa.int32()),  # tokens of what the environment said to it, or of the next turn's own prompt
        ("calls", pa.int32()),  # of tools
        ("errors", pa.int32()),  # of these, those that could not be read
        ("reward", pa.float64()),  # the environment's own; null where it gave none
        ("error", pa.string()),  # why the environment failed
    ]
)
"""A turn of an episode."""

ROLLOUT_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),  # row in the prompts shard
        ("sample", pa.int16()),  # index of the completion inside its group
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("images", pa.list_(pa.string())),  # digests of the prompt's
        ("completion_tokens", pa.list_(pa.int32())),  # ends with EOS when finish_reason is stop
        (
            "logprobs",
            pa.list_(pa.float32()),
        ),  # behaviour log-probs, one per completion token
        ("finish_reason", pa.string()),
        ("seed", pa.uint64()),
        # Which policy versions wrote it, in order: more than one where it was continued in a later iteration; version
        # -1 stands for an environment, -2 for a turn's own prompt; their tokens have log-probs of 0.
        ("segments", pa.list_(pa.struct([("policy_version", pa.int32()), ("tokens", pa.int32())]))),
        ("turns", pa.list_(TURN)),  # of an episode, in order; null where no environment answers
        # Of an episode: the prompt's, then by turn what the policy wrote and what it read; null as turns.
        ("messages", pa.list_(MESSAGE)),
    ]
)
"""Completions, one row each, ordered by (prompt_row, sample)."""

EXPERTS: Final = "experts"
"""Column that rollouts and samples have beside these where routers are replayed: for each token of prompt and
completion but the last, after which nothing was read, the experts that each router chose, router after router."""


def experts_type(numbers: pa.DataType, width: int) -> pa.DataType:
    """Say how the experts of a row are kept: `width` of a token, as 8 or 16 bits each, whatever a shard's tokens."""
    return pa.large_list(pa.list_(numbers, width))


SAMPLE_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),
        ("sample", pa.int16()),
        ("tokens", pa.list_(pa.int32())),  # prompt and completion; without completion the sample has no weight
        ("num_prompt_tokens", pa.int32()),
        ("images", pa.list_(pa.string())),
        # one of each per completion token
        ("logprobs", pa.list_(pa.float32())),  # behaviour log-probs
        ("advantages", pa.list_(pa.float32())),
        (
            "staleness",
            pa.list_(pa.int16()),
        ),  # versions between who wrote the token and who learns from it; -1: an environment wrote it
        ("values", pa.list_(pa.float32())),  # the critic's values before the update; null without a critic
        ("returns", pa.list_(pa.float32())),  # what the critic learns; null without a critic
    ]
)
"""Training samples, one row each: all that the update reads. The turns of an episode are rows of one (prompt_row,
sample), in order, where each has a prompt of its own."""

PER_TOKEN = ("logprobs", "advantages", "staleness", "values", "returns")
"""Columns of samples that have one number per completion token; where no policy wrote the token, 0 and a staleness of
-1."""

ESTIMATE_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),
        ("sample", pa.int16()),
        # one of each per completion token; null where nobody asked
        (
            "policy",
            pa.list_(pa.float32()),
        ),  # log-probs under the policy before the update, by the trainer
        ("reference", pa.list_(pa.float32())),  # log-probs under the initial policy
        ("teacher", pa.list_(pa.float32())),  # log-probs under the teacher
        ("values", pa.list_(pa.float32())),  # the critic's value of the state that the token was drawn in
    ]
)
"""What models say of each token of scored rollouts, row by row in the order of the rollout shard."""

VERDICT_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),  # -1 for a canary
        ("sample", pa.int16()),  # number of the canary in its shard
        ("vote", pa.int16()),
        ("attempt", pa.int16()),  # 0 is the first; only the last attempt of a vote counts
        ("text", pa.string()),  # the judge's answer, shortened where it is very long; null where nothing is written
        ("value", pa.float64()),  # the reward; null = invalid
        ("steps", pa.list_(pa.int32())),  # steps found wrong, where steps are judged; null = invalid
        ("error", pa.string()),  # why it is invalid
        ("tokens", pa.int32()),  # of the answer
    ]
)
"""Answers of a served reward, one row per vote and attempt, ordered by (prompt_row, sample, vote, attempt)."""


def score_schema(terms: tuple[str, ...], process_terms: tuple[str, ...] = ()) -> pa.Schema:
    """Columns of a score shard: the total reward (null = missing), one column per term, and the first error.

    A process term also has the first completion token of each of its spans (steps or tokens), and a value for each.
    Spans follow each other and cover the completion, so the first begins at token 0. Null where the term is missing.
    """
    return pa.schema(
        [
            ("prompt_row", pa.int32()),
            ("sample", pa.int16()),
            ("reward", pa.float64()),
            *((f"reward_{term}", pa.float64()) for term in terms),
            ("error", pa.string()),
            *((f"spans_{term}", pa.list_(pa.int32())) for term in process_terms),
            *((f"values_{term}", pa.list_(pa.float64())) for term in process_terms),
        ]
    )


_ROLLOUT_ADDITIONS: Final = {"images": list[str](), "turns": None, "messages": None}

KINDS: Final = declare_kinds(
    ShardKind("prompts", PROMPT_SCHEMA, missing={"images": [], "columns": "{}", "messages": None}),
    ShardKind("media", MEDIA_SCHEMA),
    ShardKind("rollouts", ROLLOUT_SCHEMA, missing=_ROLLOUT_ADDITIONS),
    ShardKind("unfinished", ROLLOUT_SCHEMA, missing=_ROLLOUT_ADDITIONS),
    ShardKind("scores", score_schema(())),
    ShardKind("verdicts", VERDICT_SCHEMA),
    ShardKind("estimates", ESTIMATE_SCHEMA),
    ShardKind("samples", SAMPLE_SCHEMA, missing={"images": []}),
)
"""Layouts of all shards that stages write. A change of a schema needs the next version of its kind, the values of new
columns for older shards under `missing`, and the new layout in tests/unit/models/layouts.toml."""
