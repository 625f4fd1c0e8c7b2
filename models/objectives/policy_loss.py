"""Which function is which policy loss. Shapes: N completion tokens of one pass."""

from torch import Tensor

from models.objectives.cispo import cispo
from models.objectives.config import Cispo, Gspo, LossConfig, PolicyGradient, PpoClip
from models.objectives.gspo import gspo
from models.objectives.pass_tokens import PassTokens, PolicyTerms
from models.objectives.policy_gradient import policy_gradient
from models.objectives.ppo_clip import ppo_clip


def policy_loss(logprobs_N: Tensor, old_N: Tensor, *, tokens: PassTokens, config: LossConfig) -> PolicyTerms:
    """The loss that is configured; `old_N` are the log-probs that the policy is compared with."""
    match config:
        case PpoClip():
            return ppo_clip(logprobs_N, old_N, advantages_N=tokens.advantages_N, config=config)
        case Gspo():
            return gspo(logprobs_N, old_N, tokens=tokens, config=config)
        case Cispo():
            return cispo(logprobs_N, old_N, advantages_N=tokens.advantages_N, config=config)
        case PolicyGradient():
            return policy_gradient(logprobs_N, old_N, advantages_N=tokens.advantages_N)
