"""Schemas of the Arrow tables that stages exchange."""

from enum import StrEnum
from typing import Final

import pyarrow as pa

from rheostat.infra.store.shards import ShardKind, declare_kinds


class FinishReason(StrEnum):
    """Reason why a completion ended: the policy ended it, it reached the length limit, or it was interrupted at this
    iteration's token limit. An interrupted completion continues in the next iteration.

    An episode also ends when its maximum number of turns is reached or its environment fails.
    """

    STOP = "stop"
    LENGTH = "length"
    CUT = "cut"
    TURNS = "turns"
    FAILED = "failed"


MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),  # text without images
        ("name", pa.string()),  # name of the tool that returned the message, else null
    ]
)
"""Arrow type of a chat message: role, text content, and name of the tool or person, if any."""

PROMPT_SCHEMA = pa.schema(
    [
        (
            "prompt_id",
            pa.string(),
        ),  # stable name of the problem: the BLAKE3 of its text, images and columns, 16 hex digits
        ("text", pa.string()),  # rendered prompt, the input of the tokenizer
        ("tokens", pa.list_(pa.int32())),
        ("images", pa.list_(pa.string())),  # digests, in the order of their placeholder tokens
        ("answer", pa.string()),  # reference answer, passed to rewards
        ("columns", pa.string()),  # JSON object with additional columns for the environment
        ("messages", pa.list_(MESSAGE)),  # chat before the template; null for plain text
    ]
)
"""Columns of prompt shards, with one prompt per row. Within a run, a prompt is identified by its row number."""

TEMPLATE: Final = "template"
"""Name of an additional text column of prompts. It is present if a chat has tools, template variables, or messages with
more fields than MESSAGE. It contains the input of the chat template as JSON
(`rheostat.models.data.problems.encode_template_input`), or an empty text for other prompts."""

MEDIA_SCHEMA = pa.schema(
    [
        ("digest", pa.string()),  # BLAKE3 of the bytes, 64 hex digits
        ("format", pa.string()),  # name in Pillow: PNG, JPEG, ...
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("bytes", pa.large_binary()),  # original file
    ]
)
"""Columns of media shards, with one image per row, in the order of first use by the prompts. Each image of a split is
in exactly one media shard."""

TURN = pa.struct(
    [
        ("tokens", pa.int32()),  # tokens that the policy generated
        ("observation", pa.int32()),  # tokens of the observation, or of the next turn's separate prompt
        ("calls", pa.int32()),  # number of tool calls
        ("errors", pa.int32()),  # tool calls that could not be parsed
        ("reward", pa.float64()),  # reward from the environment; null if there is none
        ("error", pa.string()),  # reason why the environment failed
        # Tree of an agent's episode; null for other episodes, whose turns are in order of time.
        ("order", pa.int32()),  # number of the request, in the order in which requests were accepted
        ("parent", pa.int32()),  # order of the turn that this one continues; null for a fresh prompt
        ("replayed", pa.bool_()),  # whether the turn was recorded before a restart of the agent
        ("finish_reason", pa.string()),
        ("text", pa.string()),  # text that the policy generated, without tool calls
    ]
)
"""Arrow type of one turn of an episode: numbers of tokens and of tool calls, reward, error, and place in the tree of
turns."""

ROLLOUT_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),  # row in the prompts shard
        ("sample", pa.int16()),  # index of the completion inside its group
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("answer", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("images", pa.list_(pa.string())),  # digests of the prompt's images
        ("completion_tokens", pa.list_(pa.int32())),  # ends with EOS if finish_reason is stop
        (
            "logprobs",
            pa.list_(pa.float32()),
        ),  # behavior log-probs, one per completion token
        ("finish_reason", pa.string()),
        ("seed", pa.uint64()),
        # Policy versions that generated the completion, in order: several if it was continued in a later iteration.
        # Version -1 marks text of an environment, -2 the separate prompt of a turn; their tokens have log-probs of 0.
        ("segments", pa.list_(pa.struct([("policy_version", pa.int32()), ("tokens", pa.int32())]))),
        # Turns of an episode in the order of their tokens, which is branch after branch for an agent's episode. Null
        # without an environment.
        ("turns", pa.list_(TURN)),
        # Messages of an episode: those of the prompt, then for each turn the policy's and the environment's. Null if
        # turns is.
        ("messages", pa.list_(MESSAGE)),
    ]
)
"""Columns of rollout shards, with one completion per row, ordered by (prompt_row, sample)."""

EXPERTS: Final = "experts"
"""Name of an additional column of rollouts and samples for mixture-of-experts policies whose routing is replayed in
training. For each token of prompt and completion except the last, which is never an input, it contains the experts that
each router chose, router after router."""


def experts_type(numbers: pa.DataType, width: int) -> pa.DataType:
    """Return the Arrow type of the experts recorded for one row: a list with `width` integers per token. `numbers` is
    the integer type of 8 or 16 bits."""
    return pa.large_list(pa.list_(numbers, width))


TOP_IDS: Final = "teacher_top_ids"
"""Name of an additional column of estimates and samples if the loss contains a divergence over the teacher's most
probable tokens. For each token that the policy generated, the list contains the IDs of k tokens, in descending order of
probability."""

TOP_LOGPROBS: Final = "teacher_top_logprobs"
"""Name of the column with the log-probs of the tokens in `TOP_IDS` under the teacher, in the same order."""

TERM_REWARD: Final = "term_reward"
"""Name of an additional column of samples if the loss depends on which completions are correct: the score of the
completion in one reward term, before shift, scale and weight. Null if the score is missing."""

SAMPLE_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),
        ("sample", pa.int16()),
        ("tokens", pa.list_(pa.int32())),  # prompt and completion; without a completion the sample has weight 0
        ("num_prompt_tokens", pa.int32()),
        ("images", pa.list_(pa.string())),
        # lists with one number per completion token
        ("logprobs", pa.list_(pa.float32())),  # behavior log-probs
        ("advantages", pa.list_(pa.float32())),
        (
            "staleness",
            pa.list_(pa.int16()),
        ),  # policy versions between generation and training of the token; -1 for an environment's token
        ("values", pa.list_(pa.float32())),  # the critic's values before the update; null without a critic
        ("returns", pa.list_(pa.float32())),  # targets of the critic; null without a critic
    ]
)
"""Columns of sample shards, with one training sample per row. The update reads only these columns. If turns have
separate prompts, the turns of an episode are consecutive rows with the same (prompt_row, sample)."""

PER_TOKEN = ("logprobs", "advantages", "staleness", "values", "returns")
"""Columns of samples that contain one number per completion token. For tokens that no policy generated, the number is
0, or -1 in `staleness`."""

ESTIMATE_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),
        ("sample", pa.int16()),
        # lists with one number per completion token; null if it was not computed
        (
            "policy",
            pa.list_(pa.float32()),
        ),  # log-probs under the policy before the update, computed by the trainer
        ("reference", pa.list_(pa.float32())),  # log-probs under the initial policy
        ("teacher", pa.list_(pa.float32())),  # log-probs under the teacher
        ("values", pa.list_(pa.float32())),  # the critic's value before the token
    ]
)
"""Columns of estimate shards: outputs of auxiliary models (reference, teacher, critic) for each completion token, with
the same rows as the rollout shard."""

VERDICT_SCHEMA = pa.schema(
    [
        ("prompt_row", pa.int32()),  # -1 for a canary
        ("sample", pa.int16()),  # for a canary, its number in the shard
        ("vote", pa.int16()),
        ("attempt", pa.int16()),  # 0 is the first; only the last attempt of a vote counts
        ("text", pa.string()),  # the judge's answer, shortened if very long; null if no text is generated
        ("value", pa.float64()),  # reward; null if invalid
        ("steps", pa.list_(pa.int32())),  # flagged steps for verdicts of kind steps; null if invalid
        ("step_values", pa.list_(pa.float64())),  # scores of all steps by a process reward model; null if invalid
        ("error", pa.string()),  # reason why the answer is invalid
        ("tokens", pa.int32()),  # tokens of the answer
    ]
)
"""Columns of verdict shards, with one answer of a judge or reward model per row, ordered by (prompt_row, sample, vote,
attempt)."""


FEEDBACK_COLUMN: Final = "feedback"
"""Name of an additional text column of scores if a reward returns feedback: the texts of all rewards about the
completion. Null if there is no text."""


def score_schema(
    terms: tuple[str, ...], process_terms: tuple[str, ...] = (), *, has_feedback: bool = False
) -> pa.Schema:
    """Return the columns of score shards: the total reward (null if missing), one column for each reward term, and the
    first error. With `has_feedback`, the last column is `FEEDBACK_COLUMN`.

    For each of the `process_terms` (terms that score steps, tokens or turns) there are two more columns: the first
    completion token of each span, and the value of each span. Spans are consecutive and cover the completion, so the
    first span starts at token 0. Both columns are null if the term is missing.
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
            *([(FEEDBACK_COLUMN, pa.string())] if has_feedback else []),
        ]
    )


_ROLLOUT_ADDITIONS: Final = {"images": list[str](), "turns": None, "messages": None}

KINDS: Final = declare_kinds(
    ShardKind("prompts", PROMPT_SCHEMA, missing={"images": [], "columns": "{}", "messages": None}),
    ShardKind("media", MEDIA_SCHEMA),
    ShardKind("rollouts", ROLLOUT_SCHEMA, version=2, missing=_ROLLOUT_ADDITIONS),
    ShardKind("unfinished", ROLLOUT_SCHEMA, version=2, missing=_ROLLOUT_ADDITIONS),
    ShardKind("scores", score_schema(())),
    ShardKind("verdicts", VERDICT_SCHEMA, version=2, missing={"step_values": None}),
    ShardKind("estimates", ESTIMATE_SCHEMA),
    ShardKind("samples", SAMPLE_SCHEMA, missing={"images": []}),
)
"""Column layouts of all kinds of shards that stages write. If you change a schema, increase the version of its kind,
add values for new columns in older shards under `missing`, and add the new layout to tests/unit/models/layouts.toml. A
new field of a struct is null in older shards."""
