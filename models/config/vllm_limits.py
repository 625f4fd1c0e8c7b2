"""Limits of the vLLM release that the engine `vllm` uses. Configurations are checked against these limits."""

import math
from typing import Final

from rheostat.infra.errors import BadInput
from rheostat.models.config.policy import ModelShape

CPU_CACHE_GIB = 1.0
"""Default size in GiB of the KV cache of a vLLM server on a CPU."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum LoRA ranks with which a vLLM server can be started: MaxLoRARanks in vllm/config/lora.py of vLLM 0.32."""

MAX_TEMPERATURE: Final = 2.0
"""Maximum temperature that vLLM accepts: SamplingParams in vllm/sampling_params.py of vLLM 0.32."""

CPU_HEAD_SIZES: Final = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM supports on CPUs: vllm.v1.attention.backends.cpu_attn of vLLM 0.32. With other
sizes vLLM crashes at the first request."""

VISION_MODELS: Final = ("idefics3",)
"""Vision-language models (`model_type`) whose log-probs in vLLM 0.32 were compared with the trainer's. All other image
processors need torchvision, whose builds for vLLM are for CUDA, so vLLM cannot load these models on CPUs."""


def check_vision_support(shape: ModelShape, name: str, *, logprobs: str) -> None:
    """Raise BadInput if vLLM's log-probs for this vision-language model were not compared with the trainer's. `name` is
    the configuration key of the engine, and `logprobs` its setting of this name."""
    if shape.vision_model_type and shape.vision_model_type not in VISION_MODELS:
        raise BadInput(
            f"{name}.kind = 'vllm' supports models that read only text, and the vision-language models "
            f"{', '.join(VISION_MODELS)}, but the model has model_type {shape.vision_model_type!r}. "
            f"Set {name}.kind = 'transformers'"
        )
    if shape.vision_model_type and logprobs == "raw":
        raise BadInput(
            f"{name}.logprobs = 'raw' does not support vision-language models: they never generate image tokens, "
            f"but raw log-probs include these tokens. Set {name}.logprobs = 'processed'"
        )


def check_longrope(shape: ModelShape, name: str) -> None:
    """Raise BadInput if vLLM scales the rotary positions of a longrope policy in another way than the trainer, so that
    their log-probs differ. `name` is the configuration key of the engine."""
    for scale in shape.longrope_scales:
        if not math.isclose(scale.trained, scale.served, rel_tol=1e-6):
            raise BadInput(
                f"{name}.kind = 'vllm' does not support this longrope model: config.json sets "
                f"{' and '.join(scale.keys)} in rope_parameters, so vLLM scales rotary positions by "
                f"{scale.served:.4g}, but the trainer by {scale.trained:.4g}, and their log-probs differ. Set "
                f"{name}.kind = 'transformers'"
            )
