"""How likely given continuations are. P prompts, C continuations, L tokens of the longest continuation, T padded prompt
tokens, V vocabulary; R = P * C rows, those of one prompt next to each other.

Each prompt is read once; its cache is repeated for the continuations that have more than one token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from infra.errors import Quarantined
from models.engines.decoding import LoadedPolicy, read_prompts


@torch.inference_mode()
def continuation_logprobs(
    policy: LoadedPolicy, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> Tensor:
    """Return the log-probability of each continuation after each prompt, at temperature 1: P x C in float64."""
    device, longest = policy.model.device, max(map(len, continuations))
    logits_PV, mask_PT, cache = read_prompts(policy, prompts)
    first_C = torch.tensor([tokens[0] for tokens in continuations], device=device)
    logprobs_PC = _log_softmax(logits_PV, policy)[:, first_C]
    if longest == 1:
        return logprobs_PC
    # Padded on the right, where causal attention never looks; padding's own log-probs are masked.
    tokens_CL = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in continuations], device=device)
    real_CL = torch.tensor([[1] * len(tokens) + [0] * (longest - len(tokens)) for tokens in continuations]).to(device)
    row_R = torch.arange(len(prompts), device=device).repeat_interleave(len(continuations))
    cache.reorder_cache(row_R)
    tokens_RL, real_RL = tokens_CL.repeat(len(prompts), 1), real_CL.repeat(len(prompts), 1)
    steps_L = torch.arange(longest - 1, device=device)
    logits_RLV = policy.model(
        input_ids=tokens_RL[:, :-1],
        attention_mask=torch.cat([mask_PT[row_R], real_RL[:, :-1]], dim=1),
        position_ids=mask_PT.sum(dim=1)[row_R][:, None] + steps_L,
        past_key_values=cache,
        use_cache=True,
    ).logits
    later_RL = _log_softmax(logits_RLV, policy).gather(2, tokens_RL[:, 1:, None]).squeeze(2)
    later_R = later_RL.masked_fill(real_RL[:, 1:] == 0, 0).sum(dim=1)
    return logprobs_PC + later_R.view(len(prompts), len(continuations))


def _log_softmax(logits: Tensor, policy: LoadedPolicy) -> Tensor:
    if not logits.isfinite().all():
        raise Quarantined(f"policy {policy.digest}: logits that are not finite while continuations were compared")
    return logits.double().log_softmax(dim=-1)
