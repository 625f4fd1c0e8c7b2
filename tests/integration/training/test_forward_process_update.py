"""An update with DiffusionNFT has the gradient of its loss, which the test computes with the model of diffusers."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.shards import write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.denoising import DenoisingConfig, OdeSampler
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import DiffusionNft
from rheostat.models.denoising.forward_process import PictureErrors
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.steps import GenerationSetup
from rheostat.models.modeling.layout import lay_out
from rheostat.models.records.media import Gallery, Media
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import SAMPLE_SCHEMA
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import UpdateWork
from tests.support.generated_pictures import COEFFICIENT, build_update
from tests.support.processes import preload
from tests.support.update_workers import Job, change, gradients, run_on_ranks, start_worker

preload(__name__)

STEPS = 4
LEVELS = [*range(STEPS - 1)]
"""Denoising steps at whose noise level pictures are trained. The level of the last step is 0.001."""
DENOISING = DenoisingConfig(steps=STEPS, sampler=OdeSampler(), text_tokens=1)
CLIP, BETA = 1.5, 0.5
CONFIG = UpdateConfig(
    minibatches=1,
    microbatch_tokens=2 * 16 * len(LEVELS),  # two pictures: three micro-batches
    max_grad_norm=1e9,
    loss=DiffusionNft(beta=BETA, advantage_clip=CLIP),
    kl=KlPenalty(coefficient=COEFFICIENT),
)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """Run with a policy, another reference policy, and an update on pictures that the policy generated.

    The advantages have both signs and are beyond the clip and within it.
    """
    uri = str(tmp_path_factory.mktemp("generated"))
    return uri, *build_update(uri, DENOISING, LEVELS, window=None)


def update(uri: str, work: UpdateWork, config: UpdateConfig = CONFIG) -> Outcome:
    return start_worker(uri, config, temperature=1.0, denoising=DENOISING).update(work)


def open_module(uri: str, version: ModelVersion, gallery: Gallery) -> PictureErrors:
    directory = fetch_bundle(open_store(f"{uri}/run"), version.weights)
    setup = GenerationSetup.load(directory, DENOISING, FrozenParts(device="cpu"))
    return PictureErrors(load_denoiser(directory), setup, gallery)


def lay_out_rows(rows: list[dict]):
    inputs = [ModelInput.from_prompt(row["tokens"][: row["num_prompt_tokens"]], tuple(row["images"])) for row in rows]
    return lay_out([each.append_completion(LEVELS) for each in inputs])


def test_the_engine_stores_the_finished_picture_only_and_names_the_levels_that_are_trained(generated):
    uri, work, rows = generated
    media = Media(open_store(f"{uri}/run"), work.media)
    for row in rows:
        assert row["tokens"][row["num_prompt_tokens"] :] == LEVELS and not any(row["logprobs"])
        assert media.states(row["images"][0], steps=0).shape == (1, 3 * 8 * 8)


def test_noised_pictures_are_the_stored_pictures_with_normal_noise_at_the_level_of_each_step(generated):
    """The noise differs among pictures and among steps, but not with the micro-batch."""
    uri, work, rows = generated
    gallery = Gallery()
    gallery.source = Media(open_store(f"{uri}/run"), work.media)
    module, cpu = open_module(uri, work.policy, gallery), torch.device("cpu")
    inputs = module.prepare_inputs(lay_out_rows(rows), cpu)
    alone = module.prepare_inputs(lay_out_rows(rows[2:3]), cpu)
    chosen = slice(2 * len(LEVELS), 3 * len(LEVELS))
    assert torch.equal(inputs.states_ND[chosen], alone.states_ND) and torch.equal(inputs.next_ND[chosen], alone.next_ND)
    levels_N1 = torch.tensor(module.setup.schedule.levels)[inputs.steps_N][:, None]
    states = [gallery.states(row["images"][0], steps=0)[0] for row in rows for _ in LEVELS]
    clean_ND = torch.from_numpy(np.stack(states))
    noise_ND = inputs.next_ND + clean_ND
    torch.testing.assert_close(inputs.states_ND, (1 - levels_N1) * clean_ND + levels_N1 * noise_ND)
    assert abs(noise_ND.mean()) < 0.05 and abs(noise_ND.std() - 1) < 0.05
    assert torch.corrcoef(noise_ND).fill_diagonal_(0).abs().max() < 0.3


def test_an_update_has_the_gradient_of_the_loss_and_of_the_squared_distance_from_the_reference(generated):
    uri, work, rows = generated
    outcome, gallery = update(uri, work), Gallery()
    gallery.source = Media(open_store(f"{uri}/run"), work.media)
    policy, reference = (open_module(uri, version, gallery) for version in (work.policy, work.reference))
    inputs = policy.prepare_inputs(lay_out_rows(rows), torch.device("cpu"))

    def predict(module: PictureErrors) -> torch.Tensor:
        condition = module.setup.encode_prompts(lay_out_rows(rows).inputs, np.repeat(range(len(rows)), len(LEVELS)))
        return module.setup.predict(module.model, inputs.states_ND, inputs.steps_N, condition, None)

    velocity_ND = predict(policy)
    with torch.no_grad():
        reference_ND = predict(reference)
    levels_N1 = torch.tensor(policy.setup.schedule.levels)[inputs.steps_N][:, None]
    old_ND = velocity_ND.detach()
    weight_N = 0.5 + torch.tensor([a for row in rows for a in row["advantages"]]).div(CLIP).clamp(-1, 1) / 2

    def weighted(each_ND: torch.Tensor) -> torch.Tensor:
        error_ND = levels_N1 * (inputs.next_ND - each_ND)
        return error_ND.square().mean(1) / error_ND.detach().abs().mean(1)

    toward_N = weighted((1 - BETA) * old_ND + BETA * velocity_ND)
    away_N = weighted((1 + BETA) * old_ND - BETA * velocity_ND)
    kl_N = (velocity_ND - reference_ND).square().mean(1)
    loss = ((weight_N * toward_N + (1 - weight_N) * away_N) * CLIP / BETA + COEFFICIENT * kl_N).mean()
    loss.backward()
    expected = np.concatenate([each.grad.numpy().ravel() for each in policy.parameters()])
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert outcome.metrics["kl"] == pytest.approx(kl_N.mean().item(), rel=1e-5) and kl_N.min() > 0
    assert outcome.metrics["velocity_change_mean"] == 0 and outcome.metrics["grad_norm_max"] > 0
    np.testing.assert_allclose(gradients(uri, outcome), expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


def test_later_minibatches_and_epochs_compare_with_the_policy_before_the_update(generated):
    """With β = 1 and advantages beyond the clip, a second epoch that compared with its own policy would have no change
    of the velocity."""
    uri, work, _ = generated
    config = change(CONFIG, learning_rate=1e-3, minibatches=2, epochs=2)
    first, again = (update(uri, work, config) for _ in range(2))
    assert (first.model, first.metrics) == (again.model, again.metrics)
    assert first.metrics["velocity_change_mean"] > 0 and first.metrics["steps"] == 4


@pytest.mark.system
def test_micro_batches_and_ranks_do_not_change_the_update(generated):
    uri, work, _ = generated
    configs = {
        "plain": CONFIG,
        "sharded": change(CONFIG, zero_stage=3),
        "adapters": change(CONFIG, lora=LoraConfig(rank=2)),
    }
    jobs = {
        name: Job(change(each, microbatch_tokens=60), [work], denoising=DENOISING) for name, each in configs.items()
    }
    many = {name: outcome for name, [outcome] in run_on_ranks(uri, jobs).items()}
    for name, found in many.items():
        alone = update(uri, work, change(configs[name], zero_stage=0, microbatch_tokens=9999))
        assert found.metrics == pytest.approx(alone.metrics, rel=1e-4, abs=1e-6), name
        if name != "sharded":  # the ranks have different parts
            expected = gradients(uri, alone)
            np.testing.assert_allclose(gradients(uri, found), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_an_advantage_that_is_not_finite_discards_the_update(generated, lora):
    uri, work, rows = generated
    poisoned = [{**row, "advantages": [float("nan")] * len(LEVELS)} for row in rows]
    table = pa.Table.from_pylist(poisoned, SAMPLE_SCHEMA)
    samples = write_shard(open_store(f"{uri}/run"), table, kind="samples", metadata={})
    outcome = update(uri, replace(work, samples=(samples,)), change(CONFIG, lora=lora))
    assert outcome.metrics["quarantined"] == 1 and outcome.model.weights == work.policy.weights
