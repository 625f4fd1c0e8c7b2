"""Pipelines that cannot be trained or generate an image; most refusals are in tests/unit/refusals/models.toml."""

import importlib.util
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from rheostat.infra.errors import BadInput
from rheostat.models.config.denoising import LearntWindow
from rheostat.models.config.policy import DiffusionPolicy
from rheostat.models.denoising import families
from rheostat.models.denoising.frozen_parts import PromptEncoder
from rheostat.models.denoising.pipeline import check_weights, load_denoiser, read_pipeline
from rheostat.models.denoising.policy import check_prompts, inspect_diffusion
from rheostat.models.modeling.parameter_storage import ParameterStorage
from tests.support.pipelines import config_of
from tests.support.processes import preload
from tests.support.refused_folders import add_pipelines

preload(__name__)


@pytest.fixture
def pipelines(tmp_path) -> Path:
    """Small pipelines by the name of their kind."""
    add_pipelines(tmp_path)
    return tmp_path


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_3"])
def test_pickled_weights_are_never_loaded(pipelines, part):
    directory = pipelines / "sd3"
    for path in (directory / part).glob("*.safetensors"):
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
    with pytest.raises(BadInput, match=f"{part} contains no safetensors.*[Pp]ickled"):
        inspect_diffusion(DiffusionPolicy(path=str(directory)), ())
    if part == "transformer":
        with pytest.raises(BadInput, match=r"safetensors is missing in the folder transformer"):
            load_denoiser(directory)
    if part == "text_encoder":
        with pytest.raises(BadInput, match="text encoders cannot be loaded: Error no file"):
            PromptEncoder(directory, tokens=16, device="cpu")


def test_weights_with_other_shapes_than_their_configuration_are_found_without_loading(pipelines):
    file = pipelines / "sd3/transformer/diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {"proj_out.bias": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(
        BadInput, match=r"weights with another shape .* proj_out.bias must have \(16,\), but has \(3,\)"
    ):
        check_weights(read_pipeline(pipelines / "sd3"))
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    with pytest.raises(BadInput, match=r"diffusion_pytorch_model.safetensors is missing"):
        check_weights(read_pipeline(pipelines / "sd3"))


def test_a_denoiser_with_another_weight_than_its_configuration_is_not_loaded(pipelines):
    file = pipelines / "sd3/transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file(weights | {"proj_out.bias": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"transformer cannot be loaded: the weight proj_out.bias has the shape \(3,\)"):
        load_denoiser(pipelines / "sd3")
    del weights["proj_out.bias"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"transformer cannot be loaded: the weight proj_out.bias is missing"):
        load_denoiser(pipelines / "sd3")


@pytest.mark.parametrize("name", ["sd3", "flux", "qwen", "sd1"])
def test_a_denoiser_is_stored_weight_by_weight_with_the_bits_that_diffusers_loads(pipelines, name):
    model = read_pipeline(pipelines / name)
    whole = families.diffusers_class(model.family.denoiser).from_pretrained(str(model.directory / model.family.folder))
    half = load_denoiser(model.directory, storage=ParameterStorage(torch.bfloat16, torch.device("cpu")))
    expected, found = dict(whole.named_parameters()), dict(half.named_parameters())
    assert found.keys() == expected.keys() and not half.training
    for weight, values in found.items():
        assert values.dtype == torch.bfloat16 and torch.equal(values, expected[weight].bfloat16()), weight
    buffers = dict(half.named_buffers())
    assert all(torch.equal(buffers[each], values) for each, values in whole.named_buffers())
    assert all(
        torch.equal(values, expected[each]) for each, values in load_denoiser(model.directory).named_parameters()
    )


@pytest.mark.parametrize("name", ["sd3", "flux", "qwen", "sd1"])
def test_a_side_that_is_a_multiple_of_the_unit_has_a_shape(pipelines, name):
    assert read_pipeline(pipelines / name).shape(config_of(pipelines / name, side=24)) == (4, 6, 6)


def test_a_window_up_to_the_last_step_with_noise_is_accepted(pipelines):
    window = LearntWindow(size=3, first=0, last=5)
    read_pipeline(pipelines / "sd3").check(config_of(pipelines / "sd3", steps=10, window=window))


@pytest.mark.parametrize(
    ("name", "text_tokens", "longest", "limit"),
    [
        ("sd1", None, 10, 12),
        ("sdxl", 99, 10, 12),
        ("sd3", 16, 14, 16),
        ("sd3", None, 254, 256),
        ("flux", None, 510, 512),
    ],
)
def test_a_prompt_of_the_longest_length_is_accepted_and_a_longer_one_refused(
    pipelines, name, text_tokens, longest, limit
):
    config = config_of(pipelines / name, text_tokens=text_tokens)
    check_prompts(pipelines / name, [("a.jsonl:1", "red square"), ("a.jsonl:2", "red " * longest)], config)
    prompts = [("a.jsonl:1", "disc"), ("a.jsonl:3", "red " * (longest + 1)), ("b", "red " * 999)]
    with pytest.raises(BadInput, match=rf"^a.jsonl:3: .* {limit} tokens .* {limit + 1}: ") as refused:
        check_prompts(pipelines / name, prompts, config)
    assert ("rollout.denoising.text_tokens, to at most 512" in str(refused.value)) == (name == "sd3")


def test_the_template_of_qwen_image_counts_except_for_the_tokens_that_the_pipeline_drops(pipelines):
    pipe = diffusers.QwenImagePipeline.from_pretrained(pipelines / "qwen", transformer=None, vae=None)
    kept_tokens = pipe.encode_prompt("", "cpu")[0].shape[1]
    config = config_of(pipelines / "qwen", text_tokens=kept_tokens + 3)
    check_prompts(pipelines / "qwen", [("a", "red square left")], config)
    with pytest.raises(BadInput, match=f"QwenImagePipeline .* {kept_tokens + 3} tokens .* {kept_tokens + 4}"):
        check_prompts(pipelines / "qwen", [("a", "red square left red")], config)


def test_without_diffusers_the_command_that_installs_it_is_named(pipelines, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(families, "find_spec", lambda name: None if name == "diffusers" else find_spec(name))
    with pytest.raises(BadInput, match=r"package diffusers, .*: pip install 'rheostat\[images\]'$"):
        inspect_diffusion(DiffusionPolicy(path=str(pipelines / "sd3")), ())
