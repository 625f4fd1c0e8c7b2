"""An update of a text-to-image policy has the gradient of its loss, which the test computes independently."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rheostat.infra.store import bundles
from rheostat.infra.store.bundles import describe_stored_files, fetch_bundle, verify_bundle
from rheostat.infra.store.storage import open_store
from rheostat.models.config.corrections import NoCorrection
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.config.divergence import KlPenalty
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy_losses import PpoClip
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.steps import GenerationSetup, StepLogprobs
from rheostat.models.modeling.layout import lay_out
from rheostat.models.records.media import Gallery, Media
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import UpdateWork
from tests.support.generated_pictures import COEFFICIENT, build_update
from tests.support.processes import preload
from tests.support.update_workers import change, gradients, start_worker

preload(__name__)

LEARNT = range(1, 4)
DRAWN = DenoisingConfig(steps=6, text_tokens=1)
MOVED = (-0.5, 0.1, 0.5)
CLIP = 0.2
CONFIG = UpdateConfig(
    minibatches=1,
    microbatch_tokens=2 * 16 * len(LEARNT),  # of two pictures: three passes
    max_grad_norm=1e9,
    loss=PpoClip(clip_low=CLIP, clip_high=CLIP),
    kl=KlPenalty(coefficient=COEFFICIENT),
    correction=NoCorrection(),
)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Run with a policy, another reference policy, and an update on pictures that the policy generated.

    Log-probs are shifted, so that ratios are beyond either clip and between them. The signs of the advantages
    alternate.
    """
    uri = str(tmp_path_factory.mktemp("drawn"))
    work, rows = build_update(uri, DRAWN, LEARNT, window=LEARNT, shifts=MOVED)
    return uri, replace(work, total_iterations=2), rows


def loaded(uri: str, version: ModelVersion, gallery: Gallery) -> StepLogprobs:
    directory = fetch_bundle(open_store(f"{uri}/run"), version.weights)
    return StepLogprobs(
        load_denoiser(directory), GenerationSetup.load(directory, DRAWN, FrozenParts(device="cpu")), gallery
    )


def update(uri: str, work: UpdateWork, config: UpdateConfig = CONFIG) -> Outcome:
    return start_worker(uri, config, temperature=1.0, denoising=DRAWN).update(work)


def test_an_update_of_a_diffusion_policy_has_the_gradient_of_its_loss(drawn):
    uri, work, rows = drawn
    outcome, gallery = update(uri, work), Gallery()
    gallery.source = Media(open_store(f"{uri}/run"), work.media)
    policy, reference = (loaded(uri, version, gallery) for version in (work.policy, work.reference))
    given = [ModelInput.from_prompt(row["tokens"][: row["num_prompt_tokens"]], tuple(row["images"])) for row in rows]
    batch, cpu = lay_out([each.append_completion(LEARNT) for each in given]), torch.device("cpu")
    read = policy.prepare_inputs(batch, cpu)
    mean_ND, std_N = policy.transitions(read)
    with torch.no_grad():
        reference_ND, _ = reference.transitions(reference.prepare_inputs(batch, cpu))
    behavior_N, advantages_N = (
        torch.tensor([number for row in rows for number in row[name]]) for name in ("logprobs", "advantages")
    )
    logprobs_N = -((read.next_ND - mean_ND).square().mean(1) / (2 * std_N**2))
    ratio_N = torch.exp(logprobs_N - behavior_N)
    gain_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantages_N)
    kl_N = (mean_ND - reference_ND).square().mean(1) / (2 * std_N**2)
    loss = (-gain_N + COEFFICIENT * kl_N).mean()
    loss.backward()
    expected = np.concatenate([each.grad.numpy().ravel() for each in policy.parameters()])
    assert outcome.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert outcome.metrics["kl"] == pytest.approx(kl_N.mean().item(), rel=1e-5) and kl_N.min() > 0
    assert [outcome.metrics[f"clip_fraction_{side}"] for side in ("low", "high")] == pytest.approx([1 / 6, 1 / 6])
    np.testing.assert_allclose(gradients(uri, outcome), expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("stage", "dtype", "lora"),
    [
        (0, "float32", None),
        (1, "bfloat16", LoraConfig(rank=2)),
        (2, "bfloat16", None),
        (3, "float32", None),
        (3, "float32", LoraConfig(rank=2)),
        (3, "float32", LoraConfig(rank=2, dora=True)),
    ],
)
def test_recomputing_layers_changes_no_bit_of_an_update(drawn, stage, dtype, lora):
    uri, work, _ = drawn
    config = change(CONFIG, zero_stage=stage, dtype=dtype, lora=lora)
    kept, again = (update(uri, work, change(config, activation_checkpointing=on)) for on in (False, True))
    assert (again.model, again.metrics) == (kept.model, kept.metrics)


def test_publishing_reads_no_frozen_component_again(drawn, monkeypatch):
    uri, work, _ = drawn
    read, digest_file = [], bundles.digest_file
    monkeypatch.setattr(bundles, "digest_file", lambda path: read.append(path) or digest_file(path))
    model = update(uri, work).model
    monkeypatch.undo()
    store = open_store(f"{uri}/run")
    verify_bundle(store, model.weights)
    before, after = (describe_stored_files(store, weights) for weights in (work.policy.weights, model.weights))
    stored = Path(uri, "run", "policies")  # read when it is loaded
    assert not [path for path in read if not path.is_relative_to(stored)]
    frozen = {name for name in before if name.endswith(".safetensors") and not name.startswith("transformer/")}
    assert len(frozen) >= 2 and all(before[name] == after[name] for name in frozen)
