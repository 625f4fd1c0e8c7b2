"""What a directory's scheduler says of noise: read, checked, and laid out as the levels of a drawing.

A scheduler of diffusers holds levels and takes steps. Its levels are followed to the number; steps are our samplers'.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from infra.errors import BadInput
from models.config.denoising import DenoisingConfig
from models.denoising.families import DenoiserFamily, class_of
from models.denoising.samplers import NoiseSchedule, ddim_schedule, flow_schedule

TIMESTEPS: Final = 1000
"""Of training; flow matching has this number in its pipelines' code."""
_FLOW: Final = "FlowMatchEulerDiscreteScheduler"
_NOISE: Final = ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "EulerDiscreteScheduler")
"""Schedulers whose configuration says which noise a model of noise was trained with."""
_CLIP: Final = ("DDIMScheduler", "DDPMScheduler")
"""Those that clip pictures unless their configuration says otherwise."""
_PLAIN: Final = (
    "invert_sigmas",
    "rescale_betas_zero_snr",
    "stochastic_sampling",
    "thresholding",
    "use_beta_sigmas",
    "use_exponential_sigmas",
    "use_karras_sigmas",
)
"""What must be off: other levels than those that are laid out here, or other steps."""


def check_scheduler(config: Mapping[str, Any], family: DenoiserFamily, *, where: str) -> None:
    """Raise BadInput where levels are laid out or predicted as our samplers do not know it."""
    kind, is_flow = config.get("_class_name"), family.reads == "velocity"
    if is_flow and kind != _FLOW:
        raise BadInput(f"{where}: scheduler {kind}: {family.denoiser} is drawn from by flow matching, expected {_FLOW}")
    prediction = config.get("prediction_type", "epsilon")
    if not is_flow and (kind not in _NOISE or prediction != "epsilon"):
        raise BadInput(
            f"{where}: scheduler {kind} of prediction_type {prediction!r}: expected 'epsilon' and one of "
            f"{', '.join(_NOISE)}, whose noise DDIM steps through"
        )
    wanted: dict[str, object] = dict.fromkeys(_PLAIN, False)
    wanted |= {"clip_sample": False, "timestep_type": "discrete", "time_shift_type": "exponential"}
    if is_flow:
        wanted["num_train_timesteps"] = TIMESTEPS
    if is_flow and not family.evenly:
        wanted["use_dynamic_shifting"] = False
    found = {"clip_sample": kind in _CLIP} | dict(config)
    for name, value in wanted.items():
        if found.get(name, value) != value:
            raise BadInput(
                f"{where}: scheduler {kind}: {name} {found[name]!r}: expected {value!r}: pictures are not drawn so here"
            )


def schedule_of(
    scheduler: Mapping[str, Any], family: DenoiserFamily, config: DenoisingConfig, *, tokens: int
) -> NoiseSchedule:
    """The levels of noise of a drawing. Raises BadInput where the sampler is not for such models."""
    if config.sampler.reads != family.reads:
        fitting = "'ddim'" if family.reads == "noise" else "'sde', 'dance' or 'cps'"
        raise BadInput(
            f"rollout.denoising.sampler.kind {config.sampler.kind!r}: {family.denoiser} says the "
            f"{family.reads}, expected {fitting}"
        )
    if family.reads == "noise":
        return _noise_schedule(scheduler, config)
    shift, terminal = float(scheduler.get("shift", 1.0)), scheduler.get("shift_terminal")
    if not family.evenly:
        return flow_schedule(config.steps, shift=shift, terminal=terminal)
    mu = _shift_of(tokens, scheduler) if scheduler.get("use_dynamic_shifting") else math.log(shift)
    return flow_schedule(config.steps, mu=mu, terminal=terminal)


def _shift_of(tokens: int, scheduler: Mapping[str, Any]) -> float:
    """How far large pictures are shifted towards noise: linear in their tokens; defaults are the pipelines'."""
    least, most = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
    low, high = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
    slope = (high - low) / (most - least)
    return float(tokens * slope + low - slope * least)


def _noise_schedule(scheduler: Mapping[str, Any], config: DenoisingConfig) -> NoiseSchedule:
    found = class_of(str(scheduler["_class_name"])).from_config(dict(scheduler))
    whole = found.config  # with the defaults of its class
    return ddim_schedule(
        config.steps,
        found.alphas_cumprod,
        spacing=str(whole["timestep_spacing"]),
        steps_offset=int(whole["steps_offset"]),
        set_alpha_to_one=bool(whole.get("set_alpha_to_one", True)),
    )
