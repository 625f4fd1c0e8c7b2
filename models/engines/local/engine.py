"""Generation inside the worker with Hugging Face transformers."""

import gc
import time
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from rheostat.models.config.context import usable_context
from rheostat.models.config.engines import SamplingConfig, TransformersEngine
from rheostat.models.engines.device import choose_device
from rheostat.models.engines.local.continuous import ContinuousDecoder
from rheostat.models.engines.local.decoding import decode
from rheostat.models.engines.local.loaded_policy import LoadedPolicy, continuation_logprobs
from rheostat.models.engines.local.recorded_experts import record_experts
from rheostat.models.engines.protocol import Completion, Request, StepSums
from rheostat.models.engines.requests import (
    build_rows,
    end_tokens,
    require_context,
    require_engine_room,
    suppressed_tokens,
)
from rheostat.models.modeling.merging import load_merged
from rheostat.models.modeling.policy import load_policy, load_vision
from rheostat.models.records.media import ImageSource
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.tokenizer import load_tokenizer


class HuggingFaceEngine:
    """Rollout engine that generates in the worker process with Hugging Face transformers and a KV cache. It supports
    any causal language model that needs no custom code.

    Rows are sorted by their current length, then by the order of requests, and at most `max_batch_rows` are decoded
    together. Waiting rows take the places of finished rows if every cache layer keeps all tokens. Which rows share a
    step depends only on the requests, never on timing. The same requests give the same completions, bit for bit, in
    every process with the same software and number of threads. In another batch, a completion still uses the same
    random numbers, but sums may be rounded differently in the last bits of float32.

    `batch_continuously` returns a decoder that batches the calls of several threads. Which rows share a step then
    depends on timing, so completions are the same up to rounding.
    """

    def __init__(self, config: TransformersEngine, *, adapter_rank: int = 0) -> None:  # adapters are merged
        self.progress = 0
        self._config = config
        self._device = choose_device()
        self._policy: LoadedPolicy | None = None
        self._images: ImageSource | None = None
        self._records_experts = False
        self._steps = StepSums()
        self._stepped = 0.0  # time at which the last forward pass ended

    def producer(self) -> str:
        return self._config.kind

    def load(self, directory: Path, policy: ModelVersion, *, adapter: Path | None = None) -> int:
        self.sleep()  # the old weights are freed before the new ones are loaded, because two policies may not fit
        dtype = getattr(torch, self._config.dtype)
        if adapter is None:
            model = load_policy(directory, device=self._device, dtype=dtype).eval()
        else:
            model = load_merged(directory, adapter, device=self._device, dtype=dtype).eval()
        tokenizer = load_tokenizer(directory)
        text = model.config.get_text_config()
        context = usable_context(getattr(text, "max_position_embeddings", None), text.to_dict())
        self._policy = LoadedPolicy(
            model=model,
            tokenizer=tokenizer,
            digest=policy.digest,
            eos_E=torch.tensor(end_tokens(tokenizer, model.generation_config), device=self._device),
            context=context,
            vision=load_vision(directory, source=self._images),
            suppressed=suppressed_tokens(model.generation_config),
        )
        self.progress += 1
        return policy.weights.bytes + (policy.adapter.bytes if policy.adapter is not None else 0)

    def show(self, images: ImageSource) -> None:
        self._images = images
        if self._policy is not None and self._policy.vision is not None:
            self._policy.vision.source = images

    def record_experts(self, is_enabled: bool, /) -> None:
        self._records_experts = is_enabled

    def loaded_digest(self) -> str:
        return "" if self._policy is None else self._policy.digest

    def sleep(self) -> None:
        model_ref = None if self._policy is None else weakref.ref(self._policy.model)
        self._policy = None
        # A reference cycle may keep the model alive, so garbage is collected, which takes 0.1 s.
        if model_ref is not None and model_ref() is not None:
            gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self.sleep()

    def step_sums(self) -> StepSums:
        return self._steps

    def score_continuations(
        self, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        assert self._policy is not None, "likelihoods before load"
        longest = max(map(len, continuations))
        require_context(prompts, longest, context=self._policy.context)
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))  # stable, like in `generate`
        size = max(1, self._config.max_batch_rows // (len(continuations) if longest > 1 else 1))
        results: dict[int, tuple[float, ...]] = {}
        self._stepped = time.perf_counter()
        for batch in (order[start : start + size] for start in range(0, len(order), size)):
            logprobs_PC = continuation_logprobs(self._policy, [prompts[row] for row in batch], continuations)
            results |= zip(batch, map(tuple, logprobs_PC.tolist()), strict=True)
            self._step(len(batch))
        return [results[row] for row in range(len(prompts))]

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        assert self._policy is not None, "generate before load"
        require_engine_room(requests, sampling, context=self._policy.context)
        rows = build_rows(requests, longest=sampling.max_new_tokens)
        rows.sort(key=lambda row: len(row.input))  # stable: requests of equal length keep their order
        groups: list[dict[int, Completion]] = [{} for _ in requests]
        self._stepped = time.perf_counter()
        policy, places = self._policy, self._config.max_batch_rows
        notes = record_experts(policy.model, rows, policy=policy.digest) if self._records_experts else nullcontext()
        with notes as recorder:
            completions = decode(policy, rows, sampling, places=places, on_step=self._step, recorder=recorder)
        for row, completion in zip(rows, completions, strict=True):
            groups[row.request][row.sample] = completion
        return [[group[sample] for sample in range(len(group))] for group in groups]

    def batch_continuously(self) -> ContinuousDecoder:
        """Return a decoder of the loaded policy. Inside the decoder's block, call no other method of the engine that
        computes or changes weights."""
        assert self._policy is not None, "continuous batching before load"
        assert not self._records_experts, "the decoder does not record experts"
        return ContinuousDecoder(self._policy, places=self._config.max_batch_rows, on_step=self._step)

    def _step(self, sequences: int) -> None:
        """Count one forward pass as progress and add its duration to the sums over decoding steps. `sequences` is the
        number of sequences that got a token. A prefill (0 sequences) is not a decoding step."""
        self.progress += 1
        now = time.perf_counter()
        seconds, self._stepped = now - self._stepped, now
        if sequences:
            self._steps = self._steps.add(sequences, seconds)
