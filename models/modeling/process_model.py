"""Process reward models: token classifiers with two labels. The second label means that a step is right.

The score of a step is the probability of the second label at the last token of the step. Shapes: B rows, T padded
width, N ends of steps in a micro-batch.
"""

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from rheostat.infra.errors import BadInput
from rheostat.models.config.attention import Attention
from rheostat.models.config.reward_terms import ProbabilityAggregation
from rheostat.models.modeling.batching import pack
from rheostat.models.modeling.layout import MicroBatch, lay_out
from rheostat.models.modeling.logprobs import ForwardInput, TokenModule
from rheostat.models.modeling.policy import lock_model_construction
from rheostat.models.modeling.reward_model import (
    ClassifierKind,
    RewardModel,
    ScoredTexts,
    check_length,
    load_reward_model,
)
from rheostat.models.modeling.shared_prompts import set_attention
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.steps import aggregate
from rheostat.models.vision.families import FAMILIES

TOKEN_CLASSIFIER: Final = ClassifierKind(
    AutoModelForTokenClassification,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    noun="token classifier",
    num_labels=2,
    outputs="two labels, for wrong and right steps",
)


class StepLogits(TokenModule):
    """Decoder with a head of two outputs that predicts, at the end of each step, the logit of the probability that the
    step is right."""

    def __init__(self, model: PreTrainedModel, *, attention: Attention | None = None) -> None:
        super().__init__()
        self.model = model
        self.shares_prompts = set_attention(model, attention)

    def forward(self, read: ForwardInput) -> Tensor:
        """Return the logit (float32) of each step of the micro-batch, of shape (N,)."""
        return read.gather_outputs(_subtract_labels(cast(Tensor, self.model.score(self.states(read)))))


def check_process_model(path: Path) -> int:
    """Check that a model directory can be used to score steps, and return the number of parameters. Weights are not
    read. Raises BadInput if a check fails."""
    return int(load_reward_model(path, device="meta", kind=TOKEN_CLASSIFIER).model.num_parameters())


def build_token_classifier(config: PretrainedConfig) -> PreTrainedModel:
    """Build a token classifier with two labels from a decoder's configuration, which is modified. Raises BadInput if
    transformers has no token classifier for the architecture, or only one without a linear layer `score`."""
    kind, others = config.model_type, "or a process reward model with model.kind = 'directory'"
    if kind in FAMILIES:
        raise BadInput(
            f"a process reward model cannot be built from the policy, a {kind}, which reads images. Use a text-only "
            f"policy, {others}"
        )
    if kind not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        raise BadInput(
            f"transformers has no token classifier for the policy's model_type {kind!r}, from which a process reward "
            f"model could be built. Use another policy, {others}"
        )
    config.num_labels = 2
    config.dtype = torch.float32
    model = cast(PreTrainedModel, AutoModelForTokenClassification.from_config(config))
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise BadInput(
            f"a process reward model cannot be built from the policy, because {type(model).__name__} has no linear "
            f"layer `score`, which computes the scores of the steps. Use another policy, {others}"
        )
    return model


def require_token_classifier(policy: PretrainedConfig) -> None:
    """Raise BadInput if no process reward model can be built from a policy with this configuration. The model is built
    on the `meta` device, without weights."""
    with lock_model_construction(), torch.device("meta"):
        build_token_classifier(copy.deepcopy(policy))


def score_steps(
    reward: RewardModel,
    inputs: Sequence[ModelInput],
    *,
    how: ProbabilityAggregation,
    batch_tokens: int,
    on_pass: Callable[[int, float], None],
) -> list[ScoredTexts]:
    """Score the steps of solutions (`encode_steps`) and return one result per solution, in order, whose value combines
    the scores of the steps by `how`. Solutions of similar lengths share a forward pass of at most `batch_tokens` padded
    tokens. After each forward pass, `on_pass` is called with the number of its rows and its duration in seconds. A
    solution that is longer than the context gets no score."""
    lengths = [len(each) for each in inputs]
    scores = [check_length(length - 1, reward.context) for length in lengths]
    fit = tuple(row for row, scored in enumerate(scores) if scored.error is None)
    for rows in pack(fit, lengths, budget=batch_tokens):
        began = time.perf_counter()
        batch = lay_out([inputs[row] for row in rows])
        values_N = _score_batch(reward, batch)
        on_pass(len(rows), time.perf_counter() - began)
        for place, row in enumerate(rows):
            steps = tuple(values_N[torch.from_numpy(batch.rows_N == place)].tolist())
            if all(0 <= value <= 1 for value in steps):
                scores[row] = ScoredTexts(aggregate(steps, how), None, steps)
            else:
                scores[row] = ScoredTexts(None, f"the model returned NaN or a score of a step outside 0 to 1: {steps}")
    return scores


@torch.inference_mode()
def _score_batch(reward: RewardModel, batch: MicroBatch) -> Tensor:
    """Return the probability, in float64, that each step of a micro-batch is right. Padding, and the token after the
    last step, are masked in attention."""
    lengths_B = torch.tensor([len(each) - 1 for each in batch.inputs])
    width = batch.tokens_BT.shape[1]  # the last column is never a step, and may exceed the context
    mask_BT = torch.arange(width - 1) < lengths_B[:, None]
    tokens_BT = torch.from_numpy(batch.tokens_BT)[:, :-1].masked_fill(~mask_BT, reward.pad or 0)
    positions_N = torch.from_numpy(batch.positions_N - batch.positions_N // width)
    device = reward.model.device
    output = reward.model(input_ids=tokens_BT.to(device), attention_mask=mask_BT.long().to(device))
    logits_N = _subtract_labels(output.logits.flatten(0, 1)[positions_N.to(device)])
    return logits_N.cpu().double().sigmoid()


def _subtract_labels(logits: Tensor) -> Tensor:
    """Return the logit of the probability of the second label. The last axis of `logits` contains the two labels."""
    return logits[..., 1].float() - logits[..., 0].float()
