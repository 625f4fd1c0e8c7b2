"""Episodes of a small random policy with the environments of tests/support/games.py."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.agents import AgentEnvironment
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.config.environments import TargetEnvironment
from rheostat.models.config.episodes import EpisodeSettings
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.model_input import rollout_inputs
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import RolloutWork
from rheostat.models.workers.rollout import RolloutWorker
from tests.support.policies import small_tokenizer, write_chat_policy
from tests.support.rollout_workers import ENGINE, example

STOPS = SamplingConfig(max_new_tokens=40, stop=("a", "e", "o", " ", "1", "0"))
"""Sampling with stop texts: a random policy seldom samples the token that ends a turn."""


def target_environment(name: str = "Echo", **settings: object) -> TargetEnvironment:
    """Return the settings of an environment of tests/support/games.py."""
    defaults = {"prompts": "text", "parser": "none", "turn_tokens": 12, "step_seconds": 20, "processes": 2}
    return TargetEnvironment(target=f"tests.support.games:{name}", **{**defaults, **settings})


class Episodes:
    """A run's store below a directory, with work for twenty episodes."""

    def __init__(self, home: Path, work: RolloutWork | None = None) -> None:
        self.home = home
        self.policy = home / "policy"
        self.store = open_store(f"{home}/run")
        self.work = work or replace(example(self.store, self.policy), sampling=STOPS)

    def play(self, settings: EpisodeSettings, engine: TransformersEngine = ENGINE, **changes: object) -> Outcome:
        """Generate the episodes of the work, with changes to it, in a worker and in processes that end afterwards."""
        worker = RolloutWorker(str(self.home), "run", engine, 1, environment=settings)
        try:
            return worker.generate(replace(self.work, **changes))
        finally:
            worker.close()

    def read_rows(self, *shards: ShardRef) -> list[dict[str, object]]:
        """Return the rows of shards, shard after shard."""
        return [row for shard in shards for row in read_shard(self.store, shard).to_pylist()]

    def play_rows(
        self, settings: EpisodeSettings, engine: TransformersEngine = ENGINE, **changes: object
    ) -> list[dict[str, object]]:
        """Generate the episodes of the work and return their rows."""
        return self.read_rows(*self.play(settings, engine, **changes).shards)


def chat_episodes(home: Path, *, max_new_tokens: int, **shape: int) -> Episodes:
    """Return episodes of two problems, two of each, with a policy that has a chat template. `shape` are changes to its
    configuration."""
    folder = home / "chat"
    write_chat_policy(folder, "qwen-2.5", likely={"<|im_end|>": 0.05}, **shape)
    made = Episodes(home)
    policy = ModelVersion(version=0, weights=publish_bundle(made.store, folder, prefix="policies"))
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    made.work = replace(made.work, policy=policy, sampling=sampling, rows=(2, 3), group_size=2)
    made.policy = folder
    return made


def agent(name: str = "talk", **settings: object) -> AgentEnvironment:
    """Return the settings of an agent of tests/support/agents.py."""
    defaults = {"turn_tokens": 20, "parser": "hermes", "agent_seconds": 60}
    return AgentEnvironment(target=f"tests.support.agents:{name}", **{**defaults, **settings})


def errors_of(rows: list[dict[str, Any]]) -> dict[int, str | None]:
    """Return the errors of rows, by prompt row."""
    return {row["prompt_row"]: next((turn["error"] for turn in row["turns"] if turn["error"]), None) for row in rows}


def index_rows(rows: list[dict[str, object]]) -> dict[tuple[int, int], dict[str, object]]:
    """Return rows by prompt row and sample."""
    return {(row["prompt_row"], row["sample"]): row for row in rows}


def require_equal_rows(rows: list[dict[str, object]], others: list[dict[str, object]], *except_for: str) -> None:
    """Check that rows are equal, except that their log-probs may differ as sums do whose batches have other shapes."""
    for row, other in zip(rows, others, strict=True):
        np.testing.assert_allclose(row["logprobs"], other["logprobs"], rtol=0, atol=1e-5)
        for column in row.keys() - {"logprobs", *except_for}:
            assert row[column] == other[column], column


def forward_logprobs(directory: Path, table: pa.Table) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the log-probs of each row's completion tokens: by a forward pass of the row alone, and as in the row."""
    forward = TokenLogprobs(load_policy(directory, device="cpu", dtype=torch.float32).eval(), temperature=1.0)
    for sequence, row in zip(rollout_inputs(table), table.to_pylist(), strict=True):
        with torch.no_grad():
            computed = forward(
                ForwardInput.from_microbatch(lay_out([sequence]), torch.device("cpu"), shares=False)
            ).numpy()
        yield computed, np.array(row["logprobs"])[sequence.trained_positions - sequence.num_prompt_tokens]


def split_turns(row: dict[str, object]) -> Iterator[tuple[dict[str, object], slice, slice]]:
    """Yield each turn of a row with the positions of its completion tokens and of the environment's answer."""
    end = 0
    for turn in row["turns"]:
        start, middle = end, end + turn["tokens"]
        end = middle + turn["observation"]
        yield turn, slice(start, middle), slice(middle, end)


def decode_turns(row: dict[str, object]) -> list[tuple[str, str]]:
    """Return the text of each turn, without its end-of-sequence token, and the text of the environment's answer."""
    tokenizer, tokens, texts = small_tokenizer(), row["completion_tokens"], []
    for _, turn, answer in split_turns(row):
        completion = tokens[turn]
        if completion[-1] == tokenizer.eos_token_id:
            completion = completion[:-1]
        texts.append((tokenizer.decode(completion), tokenizer.decode(tokens[answer])))
    return texts
