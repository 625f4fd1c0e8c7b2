"""Checks of `tests.support.fake_gpu`, by name: updates of every kind of model, with every loss and optimizer."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForSequenceClassification

from rheostat.models.config.corrections import MaskedImportance, TruncatedImportance
from rheostat.models.config.objectives import KlPenalty, UpdateConfig
from rheostat.models.denoising.frozen_parts import FrozenParts
from rheostat.models.denoising.pipeline import load_denoiser
from rheostat.models.denoising.steps import GenerationSetup, StepLogprobs
from rheostat.models.modeling import logprobs
from rheostat.models.modeling.critic import TokenValues
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import load_policy, load_vision
from rheostat.models.vision import tower
from rheostat.models.vision.tower import ImageStates, VisionInputs
from tests.support.fake_gpu import GPU, train, train_values
from tests.support.families import FAMILIES, add_test_adapters, batch, build
from tests.support.losses import LOSSES, NAMES
from tests.support.pipelines import PROMPTS, build_trainer_inputs, config_of, generate_pictures, write
from tests.support.seeing import PICTURES, prompts_of
from tests.support.vision import FAMILIES as VISION
from tests.support.vision import write_seeing

CHUNK = 4 * 300
"""Number of logits of four tokens."""
PROMPT_POSITIONS = tower._prompt_positions
TOWERS = ("llava", "gemma3", "internvl")
"""Families whose vision tower reads no number from the device."""


def update(**settings: Any) -> UpdateConfig:
    """Return the settings of an update in bfloat16."""
    return UpdateConfig(**{"dtype": "bfloat16"} | settings)


def text(family: str, *, shares: bool = True, adapters: bool = False, **options: Any) -> TokenLogprobs:
    """Build a policy of a family, with the default attention for new runs."""
    model = build(FAMILIES[family])
    if adapters:
        add_test_adapters(model)
    module = TokenLogprobs(model, temperature=0.8, attention="auto", **options)
    assert module.shares_prompts
    module.shares_prompts = shares
    return module


def critic(family: str) -> TokenValues:
    """Build a critic of a family."""
    config = build(FAMILIES[family]).config
    config.num_labels = 1
    return TokenValues(AutoModelForSequenceClassification.from_config(config).eval(), attention="auto")


def text_update(family: str = "llama", *, module: dict[str, Any] | None = None, **settings: Any) -> Callable[[], None]:
    """Return a check of an update of a text policy."""
    return lambda: train(functools.partial(text, family, **(module or {})), batch().inputs, update(**settings))


def vision_update(kind: str, *, is_frozen: bool) -> None:
    """Update a vision-language policy. The states of a frozen vision tower are computed before."""
    with tempfile.TemporaryDirectory() as home:
        directory = write_seeing(Path(home), kind)
        model = load_policy(directory).eval()
        vision = load_vision(directory, source=Pictures(), is_frozen=is_frozen)
        if is_frozen:
            states = {digest: vision.states(digest, model, torch.device("cpu")) for digest in PICTURES}
            model.base_model.get_image_features = None  # not called again
        inputs = [each.append_completion([20, 21, 22]) for each in prompts_of(directory, [1, 2, 0])]

        def copy_states(_: VisionInputs, digest: str, *__: object) -> ImageStates:
            image = states[digest]
            deep = tuple(each.to(GPU) for each in image.deep)
            return dataclasses.replace(image, states_SH=image.states_SH.to(GPU), deep=deep)

        def prompt_positions(*arguments: Any) -> Any:
            with unset_fake_temporarily():  # it reads tokens on the CPU
                return PROMPT_POSITIONS(*arguments)

        with (
            patch.object(tower, "_prompt_positions", prompt_positions),
            patch.object(VisionInputs, "states", copy_states),
            patch("torch._check_tensor_all_with", lambda *_: None),  # transformers reads a number of image tokens
        ):
            train(lambda: TokenLogprobs(model, temperature=1.0, vision=vision), inputs, update(kl=KlPenalty()))


class Pictures:
    """Source of the pictures of prompts."""

    def encoded(self, digest: str) -> bytes:
        return PICTURES[digest]


def denoiser_update(family: str, *, encodes_before: bool = False, **options: Any) -> None:
    """Update a text-to-image policy. The text encoders run in the update, unless `encodes_before` is set."""
    with tempfile.TemporaryDirectory() as home:
        directory = write(family, Path(home))
        config = config_of(directory, **options)
        inputs, gallery = build_trainer_inputs(generate_pictures(directory, config, range(1, 3)), directory)
        setup = GenerationSetup.load(directory, config, FrozenParts(device="cpu"))
        if encodes_before:
            setup.prompts.encode(PROMPTS)
        setup.prompts._device = GPU
        train(lambda: StepLogprobs(load_denoiser(directory), setup, gallery), inputs, update())


def planted(name: str) -> None:
    """Leave one tensor of the inputs on the CPU, as a line that forgets the device would."""
    prepare = logprobs.ForwardInput.from_microbatch

    def forget(*arguments: Any, **options: Any) -> logprobs.ForwardInput:
        inputs = prepare(*arguments, **options)
        if name in inputs._fields:
            return inputs._replace(**{name: getattr(inputs, name).cpu()})
        assert inputs.shared is not None, "the micro-batch shares prompts"
        return inputs._replace(shared=dataclasses.replace(inputs.shared, **{name: getattr(inputs.shared, name).cpu()}))

    with patch.object(logprobs.ForwardInput, "from_microbatch", forget):
        text_update(dtype="float32")()


def read_in_between() -> None:
    """Read a number from the device in the middle of an update."""
    plain = TokenLogprobs.forward

    def forward(module: TokenLogprobs, inputs: Any) -> Any:
        outputs = plain(module, inputs)
        return outputs * float(outputs.detach().mean())

    with patch.object(TokenLogprobs, "forward", forward):
        text_update()()


DENOISERS = ("sd3", "flux", "schnell", "sd1", "sdxl")
SOUND: dict[str, Callable[[], None]] = {
    **{f"text {name}": text_update(name) for name in FAMILIES},
    "text, float32": text_update(dtype="float32"),
    "text, padded rows": text_update(module={"shares": False}),
    "text, checkpointed": text_update(activation_checkpointing=True),
    "text, chunked head": text_update(module={"chunk_elements": CHUNK}, kl=KlPenalty()),
    "text, adapters": text_update(module={"adapters": True, "chunk_elements": CHUNK}),
    "text, Muon": text_update(optimizer={"kind": "muon"}),
    "text, entropy bonus": text_update(module={"chunk_elements": CHUNK}, entropy={"coefficient": 0.01}),
    "text, masked importance": text_update(correction=MaskedImportance(low=0.5, high=2.0)),
    "text, masked completions": text_update(correction=MaskedImportance(low=0.5, high=2.0, level="sequence", veto=0.1)),
    "text, correction of stale tokens": text_update(stale_correction=TruncatedImportance(cap=1.5)),
    "text, loss of routers": text_update("mixture", router_loss=0.01),
    **{
        f"loss {name}": text_update(loss=loss, kl=KlPenalty(), correction=TruncatedImportance(cap=1.05))
        for name, loss in zip(NAMES, LOSSES, strict=True)
    },
    **{
        f"critic {name}": functools.partial(
            lambda name: train_values(lambda: critic(name), batch().inputs, update()), name
        )
        for name in ("llama", "qwen3", "mixtral")
    },
    **{
        f"vision {kind}": functools.partial(vision_update, kind, is_frozen=True)
        for kind in VISION
        if kind != "qwen3_vl"  # its decoder reads the number of image tokens from the device
    },
    **{f"vision {kind}, trained tower": functools.partial(vision_update, kind, is_frozen=False) for kind in TOWERS},
    **{f"denoiser {name}": functools.partial(denoiser_update, name) for name in DENOISERS},
    "denoiser qwen": functools.partial(denoiser_update, "qwen", encodes_before=True),
    "denoiser, guidance": functools.partial(denoiser_update, "sd3", guidance=2.0),
}
"""Updates that use only the GPU."""
FAULTY: dict[str, Callable[[], None]] = {
    **{f"{name} on the CPU": functools.partial(planted, name) for name in ("tokens_BT", "targets_N", "places_P")},
    "a number that is read in between": read_in_between,
}
"""Updates with a planted mistake."""
CHECKS = SOUND | FAULTY
