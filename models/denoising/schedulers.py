"""Schedulers of diffusers directories: validation of their settings, and conversion to noise schedules.

A scheduler of diffusers defines noise levels and takes denoising steps. Rheostat uses the same noise levels, but takes
the steps with its own samplers.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

from rheostat.infra.errors import BadInput
from rheostat.models.config.denoising import DenoisingConfig
from rheostat.models.denoising.families import DenoiserFamily, diffusers_class
from rheostat.models.denoising.samplers import NoiseSchedule, ddim_schedule, flow_schedule

TIMESTEPS: Final = 1000
"""Number of training timesteps of flow-matching models. The pipelines of diffusers have this number in their code."""
_FLOW: Final = "FlowMatchEulerDiscreteScheduler"
_NOISE: Final = ("DDIMScheduler", "DDPMScheduler", "PNDMScheduler", "EulerDiscreteScheduler")
"""Names of the schedulers whose configuration contains the noise levels with which a noise-predicting model was
trained."""
_CLIP: Final = ("DDIMScheduler", "DDPMScheduler")
"""Names of the schedulers that clip predicted images by default. Models are accepted only if their configuration
disables clipping."""
_PLAIN: Final = (
    "invert_sigmas",
    "rescale_betas_zero_snr",
    "stochastic_sampling",
    "thresholding",
    "use_beta_sigmas",
    "use_exponential_sigmas",
    "use_karras_sigmas",
)
"""Scheduler settings that must be off, because Rheostat does not implement their changes to noise levels or denoising
steps."""


def check_scheduler(config: Mapping[str, Any], family: DenoiserFamily, *, where: str) -> None:
    """Raise BadInput if the samplers do not support a scheduler's noise levels or its prediction type. `config` is the
    scheduler's configuration, and `where` names the policy in messages."""
    kind, is_flow = config.get("_class_name"), family.prediction_type == "velocity"
    if is_flow and kind != _FLOW:
        raise BadInput(
            f"{where}: the scheduler {kind} is not supported, because {family.denoiser} is a flow-matching model and "
            f"needs {_FLOW}. Change the scheduler of the model directory, or use another model."
        )
    prediction = config.get("prediction_type", "epsilon")
    if not is_flow and (kind not in _NOISE or prediction != "epsilon"):
        raise BadInput(
            f"{where}: the scheduler {kind} with prediction_type {prediction!r} is not supported. Models that predict "
            f"noise need prediction_type 'epsilon' and one of the schedulers {', '.join(_NOISE)}. Change the "
            "scheduler of the model directory, or use another model."
        )
    required: dict[str, object] = dict.fromkeys(_PLAIN, False)
    required |= {"clip_sample": False, "timestep_type": "discrete", "time_shift_type": "exponential"}
    if is_flow:
        required["num_train_timesteps"] = TIMESTEPS
    if is_flow and not family.uses_even_spacing:
        required["use_dynamic_shifting"] = False
    settings = {"clip_sample": kind in _CLIP} | dict(config)
    for name, value in required.items():
        if settings.get(name, value) != value:
            raise BadInput(
                f"{where}: the scheduler {kind} has {name} = {settings[name]!r}, which is not supported. Set it to "
                f"{value!r} in scheduler_config.json if the model was trained with this value, or use another model."
            )


def schedule_of(
    scheduler: Mapping[str, Any], family: DenoiserFamily, config: DenoisingConfig, *, tokens: int
) -> NoiseSchedule:
    """Return the noise levels and timesteps of the denoising steps, given the scheduler's configuration.

    `tokens` is the number of tokens that the denoiser reads for one image. Raises BadInput if the configured sampler
    does not support the model's kind of prediction (velocity or noise).
    """
    if config.sampler.prediction_type != family.prediction_type:
        fitting = "'ddim'" if family.prediction_type == "noise" else "'sde', 'dance', 'cps' or 'ode'"
        raise BadInput(
            f"rollout.denoising.sampler.kind is {config.sampler.kind!r}, but {family.denoiser} predicts the "
            f"{family.prediction_type}. Set the kind to {fitting}."
        )
    if family.prediction_type == "noise":
        return _noise_schedule(scheduler, config)
    shift, terminal = float(scheduler.get("shift", 1.0)), scheduler.get("shift_terminal")
    if not family.uses_even_spacing:
        return flow_schedule(config.steps, shift=shift, terminal=terminal)
    mu = _shift_of(tokens, scheduler) if scheduler.get("use_dynamic_shifting") else math.log(shift)
    return flow_schedule(config.steps, mu=mu, terminal=terminal)


def _shift_of(tokens: int, scheduler: Mapping[str, Any]) -> float:
    """Return the shift of noise levels towards noise (`mu` of `flow_schedule`) for an image of `tokens` tokens.

    The shift is linear in the number of image tokens. Missing settings of the scheduler have the defaults of diffusers'
    pipelines.
    """
    min_length, max_length = scheduler.get("base_image_seq_len", 256), scheduler.get("max_image_seq_len", 4096)
    low, high = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
    slope = (high - low) / (max_length - min_length)
    return float(tokens * slope + low - slope * min_length)


def _noise_schedule(scheduler: Mapping[str, Any], config: DenoisingConfig) -> NoiseSchedule:
    built = diffusers_class(str(scheduler["_class_name"])).from_config(dict(scheduler))
    whole = built.config  # includes the default values of the class
    return ddim_schedule(
        config.steps,
        built.alphas_cumprod,
        spacing=str(whole["timestep_spacing"]),
        steps_offset=int(whole["steps_offset"]),
        set_alpha_to_one=bool(whole.get("set_alpha_to_one", True)),
    )
