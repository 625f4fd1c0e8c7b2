"""Limits of the vLLM release that the engine `vllm` uses. Configurations are checked against these limits."""

from typing import Final

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
