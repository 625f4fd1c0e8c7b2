"""Prompts that a run must forget, and their contents that must then not be found."""

import numpy as np

from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard


def rollouts(job):
    """Return every rollout of a run, of iterations and evaluations."""
    run = open_run(str(job.store), "tiny")
    made = [each for each in run.manifests() if "/rollout/" in each.key]
    return [row | {"key": each.key} for each in made for row in read_shard(run.store, each.shards[0]).to_pylist()]


def choose_prompts(job):
    """Return the ids of two prompts of iterations, and of a held-out one."""
    rows = rollouts(job)
    train = list(dict.fromkeys(row["prompt_id"] for row in rows if row["key"].startswith("it-")))
    heldout = [row["prompt_id"] for row in rows if "eval-" in row["key"]]
    return [train[0], train[-1], heldout[0]]


def secrets_of(job, ids):
    """Return the secrets of the prompts as bytes: texts, tokens and log-probs that occur nowhere else in the run."""

    def said(rows):
        texts = [row[name].encode() for row in rows for name in ("prompt", "completion")]
        tokens = [
            np.array(row[name], np.int32).tobytes() for row in rows for name in ("prompt_tokens", "completion_tokens")
        ]
        return texts + tokens + [np.array(row["logprobs"], np.float32).tobytes() for row in rows]

    rows = rollouts(job)
    others = b" ".join(said([row for row in rows if row["prompt_id"] not in ids]))
    own = [
        each for each in said([row for row in rows if row["prompt_id"] in ids]) if len(each) > 5 and each not in others
    ]
    assert len(own) > 20
    return own
