"""Runs whose KL penalty measures the divergence from an exponential moving average of the policies (`ema_decay`)."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from rheostat.flows.cli.train import run_flow
from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle, has_bundle
from rheostat.infra.store.copies import copy_run
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import open_run
from rheostat.infra.store.shards import read_shard
from rheostat.models.config.divergence import ReferenceRule
from rheostat.models.training.moving_average import check_initial_policy, write_average
from rheostat.tasks import commit
from rheostat.tasks.run.iteration import Iteration
from rheostat.tasks.run.references import reference_iteration, select_reference
from rheostat.tasks.run.reverts import policy_after, revert_key
from rheostat.tasks.verification.invariants import check_invariants, verify_run
from tests.support.episodes import forward_logprobs
from tests.support.in_process import InProcessJob, copy_job
from tests.support.policies import write_policy
from tests.support.whole_runs import check_same_run, copy_until

pytestmark = pytest.mark.timeout(1200)

DECAY = 0.75
IN_LOSS = ("iterations=4", "update.minibatches=1", f"update.kl={{kind='k3', coefficient=0.1, ema_decay={DECAY}}}")
IN_REWARD = ("iterations=2", f"algorithm={{kind='grpo', kl={{kind='k3', coefficient=0.1, ema_decay={DECAY}}}}}")
KEEP_ALL = "retention.keep_last=6"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prefect_api) -> InProcessJob:
    """Tiny run of four iterations that keeps all policies and references."""
    job = InProcessJob(tmp_path_factory.mktemp("average"), prefect_api)
    job.train(*IN_LOSS, KEEP_ALL)
    return job


def run_of(job, name="tiny"):
    return open_run(str(job.store), name)


def tensors_of(run, bundle):
    return load_file(fetch_bundle(run.store, bundle) / WEIGHTS)


def check_average(run, number):
    """Check that the reference of iteration `number` is the weighted sum of all policies before it, in float64."""
    reference = tensors_of(run, Iteration(run, number).reference_model.weights)
    policies = [tensors_of(run, policy_after(run, each).bundles["weights"]) for each in range(number)]
    shares = [DECAY ** (number - 1), *((1 - DECAY) * DECAY ** (number - 1 - each) for each in range(1, number))]
    assert sum(shares) == pytest.approx(1)
    for name, tensor in reference.items():
        expected = sum(share * each[name].double() for share, each in zip(shares, policies, strict=True))
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)
    return reference, policies


def test_the_reference_is_the_moving_average_of_the_policies(trained):
    run = run_of(trained)
    assert Iteration(run, 1).reference_model.weights == policy_after(run, 0).bundles["weights"]
    for number in (2, 3, 4, 5):
        reference, policies = check_average(run, number)
        assert any(not torch.equal(reference[name], policies[-1][name]) for name in reference)
    updates = [run.require(f"it-000{number}/update") for number in range(1, 5)]
    for number, update in enumerate(updates, start=1):
        assert [*update.parents] == [policy_after(run, number - 1).digest, run.require(f"it-000{number}/credit").digest]
        # The one minibatch is measured before its step, so the divergence is 0 only if the reference is the policy.
        assert (update.metrics["kl"] == 0) == (number == 1), number
    assert verify_run(str(trained.store), "tiny") == []


@pytest.mark.parametrize("killed", ["before", "while"])
def test_a_run_that_was_killed_and_resumed_has_the_same_bits(trained, tmp_path, prefect_api, killed):
    job = InProcessJob(tmp_path / "resumed", prefect_api)
    copy_until(trained.run, job.run, iteration=3)
    if killed == "while":  # the average of iteration 3 was written, but its bundle.json was not
        bundle = run_of(trained).require("it-0003/update").bundles["reference"]
        shutil.copytree(trained.run / bundle.key, job.run / bundle.key)
        (job.run / bundle.key / "bundle.json").unlink()
    job.train(*IN_LOSS, KEEP_ALL)
    check_same_run(job.run, trained.run)


def test_forks_and_copies_have_the_average_of_their_parent(trained, tmp_path):
    job = copy_job(trained, tmp_path / "job")
    with job.prefect():
        from rheostat.flows.fork import fork

        for name, changes in (("same", []), ("initial", ["update.kl.ema_decay="])):
            options = ["pools.cluster=threads", "report=false", *changes]
            run_flow(fork("tiny@3", name, options, store=str(job.store)))
    same, initial, parent = (run_of(job, name) for name in ("same", "initial", "tiny"))
    assert policy_after(same, 4).bundles == policy_after(parent, 4).bundles
    assert "reference" not in policy_after(initial, 4).bundles
    assert Iteration(initial, 4).reference_model.weights == policy_after(parent, 0).bundles["weights"]
    copy_run("same", str(job.store), str(tmp_path / "copies"))
    copied = open_run(str(tmp_path / "copies"), "same")
    check_average(copied, 4)
    stores = [str(job.store), str(tmp_path / "copies")]
    assert [*(verify_run(store, "same") for store in stores), verify_run(stores[0], "initial")] == [[], [], []]
    # A fork that is the first to set the key begins its average with the initial policy.
    assert reference_iteration(initial, 5, ReferenceRule(ema_decay=0.5)) == 0


def test_verify_finds_a_changed_bit_of_a_reference(trained, tmp_path):
    job = copy_job(trained, tmp_path / "job")
    bundle = run_of(job).require("it-0002/update").bundles["reference"]
    path = job.run / bundle.key / WEIGHTS
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    [problem] = verify_run(str(job.store), "tiny")
    assert bundle.key in problem and WEIGHTS in problem


def test_verify_finds_an_average_that_the_configuration_does_not_contain(trained):
    run = run_of(trained)
    del run.record.config["update"]["kl"]["ema_decay"]
    assert "it-0004/update: names a moving average, with ema_decay not set" in check_invariants(run)


def test_after_a_revert_the_reference_is_the_one_of_the_restored_policy(trained, tmp_path):
    job = copy_job(trained, tmp_path / "job")
    run = run_of(job)
    run.record.config["alarms"] = [{"kind": "kl", "action": "revert"}]
    restored = policy_after(run, 2)
    with run.lock():
        run.commit(Manifest(key=revert_key(3), bundles=restored.bundles, detail={"to": 2, "version": 3}))
    rule = ReferenceRule(ema_decay=DECAY)
    records = [policy_after(run, reference_iteration(run, number, rule)) for number in (3, 4)]
    assert [select_reference(each, rule).weights for each in records] == [restored.bundles["reference"]] * 2


def test_averages_are_kept_for_updates_that_must_be_repeated(trained, tmp_path, prefect_api):
    job, options = InProcessJob(tmp_path, prefect_api), (*IN_LOSS, "update.state_every=4")
    job.train(*options, "iterations=3")
    run = run_of(job)
    bundles = [policy_after(run, number).bundles for number in (1, 2, 3)]
    assert [has_bundle(run.store, each["weights"]) for each in bundles] == [False, True, True]
    assert all(has_bundle(run.store, each["reference"]) for each in bundles)
    job.train(*options)  # no optimizer state is stored, so the first three updates are repeated
    last, expected = policy_after(run, 4).bundles, policy_after(run_of(trained), 4).bundles
    assert [last[name] for name in ("weights", "reference")] == [expected[name] for name in ("weights", "reference")]
    assert verify_run(str(job.store), "tiny") == []


def test_a_penalty_in_the_reward_is_computed_from_the_average_and_old_averages_are_deleted(tmp_path, prefect_api):
    job = InProcessJob(tmp_path, prefect_api)
    job.train(*IN_REWARD, "iterations=4")
    run = run_of(job)
    stored = [number for number in range(1, 5) if has_bundle(run.store, policy_after(run, number).bundles["reference"])]
    assert stored == [3, 4]
    zero = [run.require(f"it-000{number}/credit").metrics["kl"] < 1e-9 for number in range(1, 5)]
    assert zero == [True, False, False, False]
    assert verify_run(str(job.store), "tiny") == []


@pytest.mark.thorough
def test_averages_whose_deletion_was_interrupted_are_deleted_after_a_restart(tmp_path, prefect_api, monkeypatch):
    job, options = InProcessJob(tmp_path, prefect_api), (*IN_LOSS, "update.state_every=4", "retention.keep_last=2")

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):

        def retire(run, bundles, original=commit.retire_bundles):
            if len(bundles) > 2:
                patch.setattr(commit, "bundles_in_use", interrupt)  # called after the tombstones are written
            return original(run, bundles)

        def interrupt(store):
            raise InterruptedError

        patch.setattr(commit, "retire_bundles", retire)
        job.train(*options, "iterations=6")
    job.train(*options, "iterations=8")
    run = run_of(job)
    kept = [number for number in range(1, 9) if has_bundle(run.store, policy_after(run, number).bundles["reference"])]
    assert kept == [4, 5, 6, 7, 8], "the optimizer state after iteration 4 is the newest one that is surely stored"


def test_a_teacher_is_the_average_of_the_policies_and_reads_its_own_prompt(tmp_path, prefect_api):
    teacher = f"{{kind='policy', template='{{prompt}}', ema_decay={DECAY}}}"
    options = ("iterations=3", KEEP_ALL, f"algorithm={{kind='grpo', distillation={{teacher={teacher}}}}}")
    job = InProcessJob(tmp_path, prefect_api)
    job.train(*options)
    run = run_of(job)
    for number in (1, 2, 3):
        iteration = Iteration(run, number)
        model = select_reference(policy_after(run, number - 1), ReferenceRule(ema_decay=DECAY))
        table = read_shard(run.store, iteration.scored_rollouts().shards[0].rollouts)
        stored = read_shard(run.store, run.require(f"it-000{number}/estimates").shards[0])
        directory = fetch_bundle(run.store, model.weights)
        rows = zip(stored["teacher"].to_pylist(), stored["policy"].to_pylist(), strict=True)
        for (teacher_T, policy_T), (expected_T, _) in zip(rows, forward_logprobs(directory, table), strict=True):
            np.testing.assert_allclose(teacher_T, expected_T, atol=1e-4)
            assert (teacher_T == policy_T) == (number == 1)
    check_average(run, 3)
    resumed = InProcessJob(tmp_path / "resumed", prefect_api)
    copy_until(job.run, resumed.run, iteration=2)
    resumed.train(*options)
    check_same_run(resumed.run, job.run)
    assert verify_run(str(job.store), "tiny") == []


# ---- one average


def write_policies(folder, *, seeds):
    """Write two random policies, and return their directories."""
    paths = [folder / name for name in ("policy", "reference")]
    for path, seed in zip(paths, seeds, strict=True):
        write_policy(path, seed=seed)
    return paths


def test_an_average_equals_the_synchronized_reference_of_trl(tmp_path):
    policy, reference = write_policies(tmp_path, seeds=(0, 1))
    target = tmp_path / "average"
    target.mkdir()
    written = write_average(policy, reference, target, decay=0.9)
    average, tensors, old = (load_file(path / WEIGHTS) for path in (target, policy, reference))
    models = [nn.ParameterList([some[name].float() for name in average]) for some in (tensors, old)]
    SyncRefModelCallback._sync_target_model(*models, alpha=1 - 0.9)
    assert written.keys() == {WEIGHTS}
    for tensor, expected in zip(average.values(), models[1], strict=True):
        torch.testing.assert_close(tensor, expected.data, rtol=1e-6, atol=1e-8)


def test_small_changes_are_kept_although_the_files_of_the_policy_are_bfloat16(tmp_path):
    policy, reference = write_policies(tmp_path, seeds=(0, 0))
    for directory, value in ((policy, 2.0), (reference, 1.0)):
        tensors = load_file(directory / WEIGHTS)
        filled = {name: torch.full_like(each, value).bfloat16() for name, each in tensors.items()}
        save_file(filled, directory / WEIGHTS, metadata={"format": "pt"})
    target = tmp_path / "average"
    target.mkdir()
    write_average(policy, reference, target, decay=0.999)
    # 0.999 · 1 + 0.001 · 2 = 1.001, and the next number after 1 in bfloat16 is 1.0078.
    for tensor in load_file(target / WEIGHTS).values():
        torch.testing.assert_close(tensor, torch.full(tensor.shape, 1.001), rtol=1e-6, atol=0)
    assert '"dtype": "float32"' in (target / "config.json").read_text()


def test_references_without_the_tensors_of_the_policy_are_refused(tmp_path):
    policy, reference = write_policies(tmp_path, seeds=(0, 0))
    tensors = load_file(reference / WEIGHTS)
    tensors.pop("model.norm.weight")
    save_file(tensors, reference / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"ema_decay .*model\.norm\.weight.*reset_every"):
        write_average(policy, reference, tmp_path, decay=0.5)


def write_gpt2(directory):
    """Write a small GPT-2 whose tensors have the names of the original files, without the prefix of the decoder."""
    write_policy(directory, "gpt2")
    tensors = load_file(directory / WEIGHTS)
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, directory / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("fault", ["other names", "quantized"])
def test_an_initial_policy_that_cannot_be_averaged_is_refused_before_the_run_begins(tmp_path, prefect_api, fault):
    write_policy(tmp_path / "saved", "gpt2")
    check_initial_policy(tmp_path / "saved")
    if fault == "other names":
        write_gpt2(tmp_path / "policy")
    else:
        write_policy(tmp_path / "policy")
        config = json.loads((tmp_path / "policy/config.json").read_text())
        quantized = config | {"quantization_config": {"quant_method": "fp8", "dequantize": True}}
        (tmp_path / "policy/config.json").write_text(json.dumps(quantized))
    job = InProcessJob(tmp_path / "job", prefect_api)
    with pytest.raises(BadInput, match=r"ema_decay .*(transformer\.|quantized).*save_pretrained"):
        job.train(*IN_LOSS, "policy.kind=directory", f"policy.path={tmp_path}/policy", "warmup=")
    assert not job.run.exists()
