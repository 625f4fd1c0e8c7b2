"""Policy that is loaded for generation: forward passes over prompts, and the log-probs of fixed tokens.

Shapes: P prompts, T (padded) prompt tokens, E end tokens, V vocabulary, C continuations, L tokens of the longest
continuation, R pairs of a prompt and a continuation, K most probable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast

from rheostat.infra.errors import Quarantined
from rheostat.models.engines.protocol import SequenceScores
from rheostat.models.engines.sampling import MAX_ELEMENTS
from rheostat.models.records.model_input import ModelInput
from rheostat.models.vision.tower import VisionInputs, encode_images, mask_tokens, prepare_rows


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """Policy that is loaded for generation: its model, its tokenizer and its special tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    digest: str
    eos_E: Tensor
    """Token IDs that end a completion, as a tensor."""
    context: int | None
    """Longest sequence in tokens, or None if the architecture sets no limit."""
    vision: VisionInputs | None = None
    """Vision tower and image settings, or None for a text-only policy."""
    suppressed: tuple[int, ...] = ()
    """Token IDs that the policy never generates, such as those of embedding rows that belong to no token."""

    @property
    def banned(self) -> tuple[int, ...]:
        """IDs of all tokens that have probability 0, because they are suppressed or are placeholders of images."""
        return self.suppressed if self.vision is None else (*self.vision.banned, *self.suppressed)


def read_prompts(policy: LoadedPolicy, prompts: Sequence[ModelInput]) -> tuple[Tensor, Tensor, Tensor, Cache]:
    """Run a forward pass over prompts, padded on the left. Returns the logits of the next token, the attention mask,
    the offsets between tokens and positions, and the filled KV cache."""
    device, width = policy.model.device, max(map(len, prompts))
    tokens_PT = np.zeros((len(prompts), width), np.int64)
    for tokens_T, prompt in zip(tokens_PT, prompts, strict=True):
        tokens_T[width - len(prompt) :] = prompt.tokens
    mask_PT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    offsets_P = torch.zeros_like(mask_PT[:, 0])
    options = {"position_ids": (mask_PT.cumsum(dim=1) - 1).clamp(min=0)}
    if policy.vision is not None:
        rows = prepare_rows(policy.vision, policy.model, prompts, device=device, width=width, pads_left=True)
        offsets_P, options = rows.offsets_B, encode_images(policy.model, rows).options
    output = policy.model(
        input_ids=torch.from_numpy(tokens_PT).to(device),
        attention_mask=mask_PT,
        use_cache=True,
        logits_to_keep=1,
        **options,
    )
    return output.logits[:, -1], mask_PT, offsets_P, output.past_key_values


@torch.inference_mode()
def continuation_logprobs(
    policy: LoadedPolicy, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
) -> Tensor:
    """Return the summed log-prob of each continuation after each prompt, at temperature 1, as float64 of shape
    (prompts, continuations). Raises Quarantined if a logit is not finite."""
    device, longest = policy.model.device, max(map(len, continuations))
    logits_PV, mask_PT, offsets_P, cache = read_prompts(policy, prompts)
    first_C = torch.tensor([tokens[0] for tokens in continuations], device=device)
    logprobs_PC = _log_softmax(logits_PV, policy)[:, first_C]
    if longest == 1:
        return logprobs_PC
    # Padding is on the right, where causal attention never looks; the log-probs of padding are masked.
    tokens_CL = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in continuations], device=device)
    real_CL = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in continuations]).to(device)
    row_R = torch.arange(len(prompts), device=device).repeat_interleave(len(continuations))
    cache.reorder_cache(row_R)
    tokens_RL, real_RL = tokens_CL.repeat(len(prompts), 1), real_CL.repeat(len(prompts), 1)
    steps_L = torch.arange(longest - 1, device=device)
    logits_RLV = policy.model(
        input_ids=tokens_RL[:, :-1],
        attention_mask=torch.cat([mask_PT[row_R], real_RL[:, :-1]], dim=1),
        position_ids=(mask_PT.sum(dim=1) + offsets_P)[row_R][:, None] + steps_L,
        past_key_values=cache,
        use_cache=True,
    ).logits
    later_RL = _log_softmax(logits_RLV, policy).gather(2, tokens_RL[:, 1:, None]).squeeze(2)
    later_R = later_RL.masked_fill(real_RL[:, 1:] == 0, 0).sum(dim=1)
    return logprobs_PC + later_R.view(len(prompts), len(continuations))


@torch.inference_mode()
def sequence_scores(policy: LoadedPolicy, tokens: Sequence[int], top: int) -> SequenceScores:
    """Return the log-prob of each token of a sequence without images after the tokens before it, and the `top` most
    probable tokens at each place, at temperature 1. Raises Quarantined if a logit is not finite.

    The sequence is processed in pieces that extend the KV cache, because the logits of all places may not fit into the
    memory.
    """
    tokens_T = torch.tensor(tokens, device=policy.model.device)
    vocabulary = policy.model.config.get_text_config().vocab_size
    size, last = max(1, MAX_ELEMENTS // vocabulary), len(tokens) - 1
    logprobs: list[float] = []
    best: list[tuple[tuple[int, float], ...]] = []
    cache: Cache | None = None
    for start in range(0, last, size):
        end = min(start + size, last)
        output = policy.model(
            input_ids=tokens_T[None, start:end],
            attention_mask=torch.ones((1, end), dtype=torch.long, device=tokens_T.device),
            position_ids=torch.arange(start, end, device=tokens_T.device)[None],
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        scores_TV = _log_softmax(output.logits[0], policy)
        logprobs += scores_TV.gather(1, tokens_T[start + 1 : end + 1, None]).squeeze(1).tolist()
        best_TK = scores_TV.topk(min(top, scores_TV.shape[1]), dim=1)
        for tokens_K, logprobs_K in zip(best_TK.indices.tolist(), best_TK.values.tolist(), strict=True):
            best.append(tuple(zip(tokens_K, logprobs_K, strict=True)))
    return SequenceScores(tuple(logprobs), tuple(best))


def _log_softmax(logits: Tensor, policy: LoadedPolicy) -> Tensor:
    if not logits.isfinite().all():
        raise Quarantined(
            f"the policy with digest {policy.digest} computed NaN or infinite logits for fixed tokens whose "
            "log-probs are computed. Check its weights, and lower the learning rate if training has caused this"
        )
    return mask_tokens(logits.double(), policy.banned).log_softmax(dim=-1)
