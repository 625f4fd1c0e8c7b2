"""A directory that cannot be trained, and a drawing that it cannot make, are one line that says what was expected."""

import importlib.util
import json
import shutil

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.errors import BadInput
from models.config.denoising import CpsSampler, DdimSampler, LearntWindow
from models.config.policy import DiffusionPolicy
from models.denoising import families
from models.denoising.pipeline import PromptReader, check_weights, load_denoiser, read_pipeline
from models.denoising.policy import check_prompts, inspect_diffusion
from tests.support.pipelines import config_of, write
from tests.support.processes import preload

preload(__name__)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Whole policies, by family."""
    return {name: write(name, tmp_path_factory.mktemp(name)) for name in ("sd3", "flux", "qwen", "sd1", "sdxl")}


@pytest.fixture
def copy(whole, tmp_path):
    def copied(name):
        shutil.copytree(whole[name], tmp_path / "p")
        return tmp_path / "p"

    return copied


def edit(path, **settings):
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def said_of(act, *arguments):
    """The line that an act is refused with."""
    with pytest.raises(BadInput) as refused:
        act(*arguments)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_a_class_of_pipelines_that_is_not_known_is_named_with_the_nearest(copy):
    directory = copy("sd3")
    edit(directory / "model_index.json", _class_name="StableDiffusion3Img2ImgPipeline")
    line = said_of(read_pipeline, directory)
    assert "StableDiffusion3Img2ImgPipeline with SD3Transformer2DModel, whose inputs are not known here" in line
    assert "did you mean 'StableDiffusion3Pipeline'" in line


@pytest.mark.parametrize(
    ("name", "file", "settings", "expected"),
    [
        ("sd1", "unet/config.json", {"in_channels": 9}, "reads 9 channels and says 4: it takes a picture beside"),
        ("flux", "transformer/config.json", {"in_channels": 96, "out_channels": 16}, "reads 96 channels and says 16"),
        ("sd1", "unet/config.json", {"class_embed_type": "timestep"}, "class_embed_type 'timestep': expected None"),
        ("sdxl", "unet/config.json", {"addition_embed_type": "text"}, "'text': expected 'text_time'"),
        ("qwen", "transformer/config.json", {"guidance_embeds": True}, "guidance_embeds True: expected None"),
        ("sd3", "scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "expected FlowMatchEulerDiscrete"),
        ("sd3", "scheduler/scheduler_config.json", {"use_karras_sigmas": True}, "use_karras_sigmas True: expected Fal"),
        ("sd3", "scheduler/scheduler_config.json", {"use_dynamic_shifting": True}, "True: expected False"),
        ("sd1", "scheduler/scheduler_config.json", {"_class_name": "LCMScheduler"}, "scheduler LCMScheduler of predic"),
        ("sd1", "scheduler/scheduler_config.json", {"prediction_type": "v_prediction"}, "'v_prediction': expected 'ep"),
        ("sd1", "scheduler/scheduler_config.json", {"_class_name": "DDIMScheduler"}, "clip_sample True: expected Fals"),
        ("sd3", "vae/config.json", {"latent_channels": 16}, "its vae has 16 channels, its transformer 4"),
        ("sd3", "model_index.json", {"text_encoder": ["os", "system"]}, "text_encoder ['os', 'system']: expected a"),
    ],
)
def test_what_is_drawn_otherwise_than_here_is_refused(copy, name, file, settings, expected):
    directory = copy(name)
    edit(directory / file, **settings)
    line = said_of(read_pipeline, directory)
    assert expected in line and str(directory) in line


def test_a_directory_of_text_is_told_from_one_that_draws(tmp_path):
    assert "no such directory" in said_of(read_pipeline, tmp_path / "none")
    assert "no model_index.json: not a directory in diffusers format" in said_of(read_pipeline, tmp_path)
    (tmp_path / "model_index.json").write_text("[]")
    assert "model_index.json: expected a JSON object, found list" in said_of(read_pipeline, tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    assert "expected one of the pipelines" in said_of(read_pipeline, tmp_path)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_3"])
def test_pickled_weights_are_never_loaded(copy, part):
    directory = copy("sd3")
    for path in (directory / part).glob("*.safetensors"):
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
    policy = DiffusionPolicy(path=str(directory))
    assert f"no safetensors in {part}; pickled weights are never loaded" in said_of(inspect_diffusion, policy, ())
    if part == "transformer":
        assert "cannot load its transformer: Error no file" in said_of(load_denoiser, directory)
    if part == "text_encoder":
        with pytest.raises(BadInput, match="cannot load its text encoders: Error no file"):
            PromptReader(directory, tokens=16, device="cpu")


def test_weights_of_other_shapes_than_the_configuration_says_are_found_without_loading(copy):
    directory = copy("sd3")
    file = directory / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.bias"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    line = said_of(check_weights, read_pipeline(directory))
    assert "1 weights are not as its config.json says, first proj_out.bias: expected (16,), found (3,)" in line
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    line = said_of(check_weights, read_pipeline(directory))
    assert "expected diffusion_pytorch_model.safetensors, found none" in line


def test_a_side_that_cannot_be_drawn_is_refused_with_the_nearest(whole):
    for name, unit in {"sd3": 8, "flux": 8, "qwen": 8, "sd1": 8}.items():
        model = read_pipeline(whole[name])
        line = said_of(model.shape, config_of(whole[name], side=29))
        assert f"rollout.denoising.side 29: expected a multiple of {unit} pixels" in line
        assert line.endswith("the nearest is 32")
        assert model.shape(config_of(whole[name], side=24)) == (4, 6, 6)
    assert "draws at most 32 pixels" in said_of(read_pipeline(whole["sd3"]).shape, config_of(whole["sd3"], side=40))


def test_a_window_beyond_the_last_step_that_has_noise_is_refused(whole):
    model = read_pipeline(whole["sd3"])
    window = LearntWindow(size=3, first=0, last=6)
    line = said_of(model.check, config_of(whole["sd3"], steps=10, window=window))
    assert "window.last 6 and size 3: step 7 is the last one" in line and line.endswith(
        "expected window.last 5 at most"
    )
    model.check(config_of(whole["sd3"], steps=10, window=LearntWindow(size=3, first=0, last=5)))


@pytest.mark.parametrize(("name", "sampler"), [("sd1", CpsSampler()), ("sd3", DdimSampler())])
def test_a_sampler_of_other_models_is_refused(whole, name, sampler):
    line = said_of(read_pipeline(whole[name]).schedule, config_of(whole[name], sampler=sampler))
    assert f"rollout.denoising.sampler.kind {sampler.kind!r}" in line and "expected '" in line


@pytest.mark.parametrize(
    ("name", "text_tokens", "longest", "expected"),
    [
        ("sd1", None, 10, "of 12 tokens at most, which StableDiffusionPipeline reads, found 13"),
        ("sdxl", 99, 10, "of 12 tokens at most, which StableDiffusionXLPipeline reads, found 13"),
        ("sd3", 16, 14, "of 16 tokens at most, which StableDiffusion3Pipeline reads, found 17"),
        ("sd3", None, 254, "of 256 tokens at most, which StableDiffusion3Pipeline reads, found 257"),
        ("flux", None, 510, "of 512 tokens at most, which FluxPipeline reads, found 513: 'red red"),
    ],
)
def test_a_prompt_is_read_whole_or_refused_with_where_it_came_from(whole, name, text_tokens, longest, expected):
    config = config_of(whole[name], text_tokens=text_tokens)
    check_prompts(whole[name], [("a.jsonl:1", "red square"), ("a.jsonl:2", "red " * longest)], config)
    line = said_of(
        check_prompts,
        whole[name],
        [("a.jsonl:1", "disc"), ("a.jsonl:3", "red " * (longest + 1)), ("b", "red " * 999)],
        config,
    )
    assert line.startswith("a.jsonl:3: expected a prompt") and expected in line
    assert ("raise rollout.denoising.text_tokens, to 512 at most" in line) == (name == "sd3")


def test_of_qwen_images_prompts_the_template_is_counted_but_for_what_is_dropped(whole):
    """What is left over of the template is what the pipeline itself encodes of an empty prompt."""
    pipe = diffusers.QwenImagePipeline.from_pretrained(whole["qwen"], transformer=None, vae=None)
    left = pipe.encode_prompt("", "cpu")[0].shape[1]
    config = config_of(whole["qwen"], text_tokens=left + 3)
    check_prompts(whole["qwen"], [("a", "red square left")], config)
    line = said_of(check_prompts, whole["qwen"], [("a", "red square left red")], config)
    assert f"a prompt of {left + 3} tokens at most, which QwenImagePipeline reads, found {left + 4}" in line
    assert "text_tokens 2000: QwenImagePipeline reads at most 1024" in said_of(
        check_prompts, whole["qwen"], [], config_of(whole["qwen"], text_tokens=2000)
    )


def test_without_diffusers_one_line_says_what_to_install(whole, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(families, "find_spec", lambda name: None if name == "diffusers" else found(name))
    line = said_of(inspect_diffusion, DiffusionPolicy(path=str(whole["sd3"])), ())
    assert line.endswith("expected the package diffusers, found none; pip install 'rheostat[images]'")
