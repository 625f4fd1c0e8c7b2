"""Each rank writes its share of the weight files. The files do not depend on the number of ranks or on a kill."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from rheostat.infra.store.bundles import CONTENTS, fetch_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.modeling import safetensors
from rheostat.models.modeling.policy import load_policy
from rheostat.models.training import publishing
from tests.support.processes import preload
from tests.support.training import publish_scratch
from tests.support.update_workers import CONFIG, change, start_ranks, start_worker, update_work

preload(__name__)

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]

FILE_BYTES = 8_000
"""Maximum size of a weight file, so that a small policy has more files than ranks."""


def _publish_both_ways(rank, ranks, port, uri, policy, configs):
    safetensors.MAX_FILE_SIZE = FILE_BYTES
    found, written = {}, {}
    for name, config in configs.items():
        worker = start_worker(uri, config, rank=rank, ranks=ranks, port=port)
        put = publishing.put_bundle_file
        publishing.put_bundle_file = lambda *args, **options: (
            written.setdefault(name, []).append(args[3]) or put(*args, **options)  # noqa: B023 -- used in this round
        )
        model = worker.update(update_work(uri, policy)).model
        publishing.put_bundle_file = put
        count, publishing._count_writers = publishing._count_writers, lambda *_: 1
        alone = worker._models.policy.describe(model, version=model.version)
        publishing._count_writers = count
        assert worker.sync([model.weights]) is not None
        found[name] = (model.weights, alone.weights)
        worker.close()
    torch.save((found, written), Path(uri, f"found-{rank}.pt"))


def test_ranks_that_write_together_publish_the_bytes_that_one_rank_would_write(uri, policy):
    configs = {
        "stage 0": CONFIG,
        "stage 2 in bfloat16": change(CONFIG, zero_stage=2, dtype="bfloat16"),
        "stage 3": change(CONFIG, zero_stage=3),
        "sequence parallelism": change(CONFIG, zero_stage=3, dtype="bfloat16", sequence_parallel=2),
    }
    start_ranks(_publish_both_ways, uri, policy, configs)
    (found, by_first), (other, by_second) = (
        torch.load(Path(uri, f"found-{rank}.pt"), weights_only=False) for rank in (0, 1)
    )
    assert found == other
    counts = set()
    for name, (together, alone) in found.items():
        assert together == alone, name
        directory = fetch_bundle(open_store(f"{uri}/run"), together)
        weights = {path.name for path in directory.glob("*.safetensors")}
        counts.add(json.loads((directory / "model.safetensors.index.json").read_text())["metadata"]["total_parameters"])
        assert {*by_second.get(name, ())} == weights - {*by_first[name]}
        shares = [len(weights & {*files.get(name, ())}) for files in (by_first, by_second)]
        assert min(shares) > 2
        assert max(shares) - min(shares) <= 1
    assert counts == {load_policy(fetch_bundle(open_store(f"{uri}/run"), policy.weights)).num_parameters()}


def _publish_average(rank, ranks, port, uri, policy, config):
    safetensors.MAX_FILE_SIZE = FILE_BYTES
    worker = start_worker(uri, config, rank=rank, ranks=ranks, port=port)
    outcome = worker.update(replace(update_work(uri, policy), ema_decay=0.75))
    worker.sync([outcome.model.weights, outcome.average])
    worker.close()
    torch.save((outcome.model.weights, outcome.average), Path(uri, f"average-{rank}.pt"))


def test_all_ranks_name_the_average_that_the_first_one_writes(uri, policy):
    start_ranks(_publish_average, uri, policy, change(CONFIG, zero_stage=3))
    results = [torch.load(Path(uri, f"average-{rank}.pt"), weights_only=False) for rank in (0, 1)]
    assert results[0] == results[1]
    store = open_store(f"{uri}/run")
    trained, average, initial = (
        load_policy(fetch_bundle(store, bundle)).state_dict() for bundle in (*results[0], policy.weights)
    )
    for name, tensor in average.items():
        torch.testing.assert_close(tensor, 0.75 * initial[name] + 0.25 * trained[name], rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(tensor, initial[name]) for name, tensor in average.items())


def _update_until_killed(rank, ranks, port, uri, policy, config, killed, moment):
    safetensors.MAX_FILE_SIZE = FILE_BYTES
    worker = start_worker(uri, config, rank=rank, ranks=ranks, port=port)
    work = update_work(uri, policy)
    if rank == killed:
        die = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        if moment == "while writing":
            worker._models.policy._on_progress = die
        else:
            setattr(publishing, moment, die)
    model = worker.update(work).model
    worker.sync([model.weights])
    worker.close()
    torch.save(model.weights, Path(uri, f"published-{rank}.pt"))


@pytest.mark.parametrize(
    ("stage", "killed", "moment"),
    [
        (0, 1, "while writing"),
        (3, 1, "while writing"),
        (0, 1, "wait_for_ranks"),
        (3, 0, "complete_put_bundle"),
    ],
)
def test_a_rank_killed_while_publishing_leaves_no_version_and_the_next_try_gives_the_same_bytes(
    uri, policy, stage, killed, moment, tmp_path
):
    config, store = change(CONFIG, zero_stage=stage), open_store(f"{uri}/run")
    before = {entry.key for entry in store.entries("policies/") if entry.key.endswith(CONTENTS)}
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        start_ranks(_update_until_killed, uri, policy, config, killed, moment)
    assert {entry.key for entry in store.entries("policies/") if entry.key.endswith(CONTENTS)} == before
    start_ranks(_update_until_killed, uri, policy, config, None, None)
    published = torch.load(Path(uri, "published-0.pt"), weights_only=False)
    fetch_bundle(store, published)
    elsewhere = tmp_path / "elsewhere"
    same_policy = publish_scratch(f"{elsewhere}/run", elsewhere / "scratch")
    start_ranks(_update_until_killed, str(elsewhere), same_policy, config, None, None)
    assert torch.load(elsewhere / "published-0.pt", weights_only=False) == published
