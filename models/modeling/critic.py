"""Critic (value model): a sequence classifier with one output, whose head predicts a value at every token.

Shapes: B rows, T padded width, N completion tokens, H hidden size.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.attention import Attention
from rheostat.models.modeling.logprobs import ForwardInput, TokenModule
from rheostat.models.modeling.parameter_storage import ParameterStorage
from rheostat.models.modeling.policy import load_policy, load_weights, lock_model_construction, save_policy
from rheostat.models.modeling.reward_model import load_reward_model
from rheostat.models.modeling.shared_prompts import set_attention
from rheostat.models.modeling.trunk import find_trunk
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.vision.families import FAMILIES


class TokenValues(TokenModule):
    """Decoder with a value head that predicts, for each completion token, the value of the state before the token."""

    def __init__(self, model: PreTrainedModel, *, attention: Attention | None = None) -> None:
        super().__init__()
        self.model = model
        self.shares_prompts = set_attention(model, attention)

    def forward(self, read: ForwardInput) -> Tensor:
        """Return the critic's value (float32) of the state before each completion token, of shape (N,). The token
        itself does not affect the value."""
        return read.gather_outputs(cast(Tensor, self.model.score(self.states(read))).float().squeeze(-1))


def load_critic(directory: Path, *, storage: ParameterStorage | None = None) -> PreTrainedModel:
    """Load a critic that the run has stored, for training. `storage` describes how its parameters are stored, by
    default in float32 on the CPU."""
    return load_weights(
        AutoModelForSequenceClassification,
        directory,
        what="critic",
        device="cpu",
        dtype=torch.float32,
        storage=storage,
    )


def classifier_from_policy(
    policy: Path,
    *,
    storage: ParameterStorage | None = None,
    build: Callable[[PretrainedConfig], PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """Build a classifier, such as a critic, from a policy's decoder and a new head that is initialized to zero, so that
    every output is 0 at first. `storage` describes how the parameters are stored, by default in float32 on the CPU.
    `build` creates the classifier whose decoder is replaced, by default a sequence classifier with one output."""
    decoder = load_policy(policy, storage=storage)
    with lock_model_construction(), torch.device("meta"):  # without a second decoder in memory
        classifier = (build or _build_classifier)(decoder.config)
    place = next(name for name, child in classifier.named_children() if child is find_trunk(classifier))
    setattr(classifier, place, find_trunk(decoder))
    head = _require_head(classifier, source=f"of {decoder.config.model_type}").to_empty(device=decoder.device)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
        if storage is not None:
            storage.store(parameter)
    return classifier


def critic_from_classifier(path: Path, policy: Path) -> PreTrainedModel:
    """Load a sequence classifier at `path` as a critic. Raises BadInput if its tokenizer differs from the policy's, or
    if it is not a causal decoder."""
    classifier = load_reward_model(path)
    check_tokenizer(classifier.tokenizer, load_tokenizer(policy), source=str(path))
    _require_head(classifier.model, source=str(path))
    _check_causal(classifier.model, source=str(path))
    return classifier.model


def build_meta_critic(policy: PretrainedConfig) -> PreTrainedModel:
    """Build a critic with the sizes of the policy on the `meta` device, without weights. Raises BadInput if
    transformers has no sequence classifier for the policy's architecture."""
    try:
        with lock_model_construction(), torch.device("meta"):
            critic = _build_classifier(copy.deepcopy(policy))
        _require_head(critic, source=f"of {policy.model_type}")
    except BadInput as error:
        raise BadInput(f"algorithm.critic: {error}") from error
    return critic


def check_critic(source: Path, tokenizer: PreTrainedTokenizerFast, *, longest_tokens: int) -> PreTrainedModel:
    """Check that a critic can predict values for the policy's sequences of up to `longest_tokens` tokens, and return it
    on the `meta` device, without weights. Raises BadInput if the tokenizer, the head or the context length does not
    fit."""
    try:
        critic = load_reward_model(source, device="meta")
        check_tokenizer(critic.tokenizer, tokenizer, source=str(source))
        _require_head(critic.model, source=str(source))
        if critic.context < longest_tokens:
            raise BadInput(
                f"critic {source}: the context of the model is {critic.context} tokens, but the longest prompt and "
                f"max_new_tokens need {longest_tokens}. Use a model with a longer context, or lower "
                "rollout.sampling.max_new_tokens"
            )
    except BadInput as error:
        raise BadInput(f"algorithm.critic: {error}") from error
    return critic.model


def write_critic(source: Path | None, policy: Path, directory: Path) -> int:
    """Write the initial critic with the policy's tokenizer into `directory`, and return the critic's number of
    parameters. The critic is a copy of the classifier at `source`, or is built from the policy if `source` is None."""
    critic = classifier_from_policy(policy) if source is None else critic_from_classifier(source, policy)
    save_policy(critic, load_tokenizer(policy), directory)
    return int(critic.num_parameters())


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, policy: PreTrainedTokenizerFast, *, source: str) -> None:
    """Raise BadInput if the critic's and the policy's tokenizers assign the same ID to different tokens. `source` names
    the critic in the message."""
    critic_ids, policy_ids = tokenizer.get_vocab(), policy.get_vocab()
    differing = sorted(
        token for token in critic_ids.keys() | policy_ids.keys() if critic_ids.get(token) != policy_ids.get(token)
    )
    if differing:
        first = differing[0]
        raise BadInput(
            f"critic {source}: the tokenizer must be that of the policy, but "
            f"{format_count(len(differing), 'token differs', 'tokens differ')} (the critic has {len(critic_ids)} "
            f"tokens, the policy {len(policy_ids)}). The first is {first!r}: the critic has "
            f"{_describe_id(critic_ids, first)}, the policy {_describe_id(policy_ids, first)}. Use a critic with the "
            "policy's tokenizer"
        )


def _build_classifier(config: PretrainedConfig) -> PreTrainedModel:
    """Build a sequence classifier with one output from a decoder's configuration. The configuration object is
    modified."""
    if config.model_type in FAMILIES:
        raise BadInput(
            f"a critic or reward model cannot be built from a {config.model_type}, which reads images. Use an "
            "algorithm without a critic, such as grpo"
        )
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise BadInput(
            f"transformers has no sequence classifier for the policy's model_type {config.model_type!r}. Set "
            "algorithm.critic.path to a classifier with the policy's tokenizer"
        )
    config.num_labels = 1
    config.dtype = torch.float32
    return cast(PreTrainedModel, AutoModelForSequenceClassification.from_config(config))


def _describe_id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "no such token"


def _require_head(model: PreTrainedModel, *, source: str) -> nn.Linear:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise BadInput(
            f"critic {source}: {type(model).__name__} has no linear layer `score` over its hidden states, which "
            "computes the values. Use a decoder that has one"
        )
    return head


@torch.no_grad()
def _check_causal(model: PreTrainedModel, *, source: str) -> None:
    """Raise BadInput if a classifier cannot predict one value per state, because its output at a token depends on later
    tokens or is not simply the output of the head. `source` names the model in the message."""
    pad = model.config.get_text_config().pad_token_id  # classifiers read the last token that is not padding
    tokens_BT = torch.tensor([[token for token in range(5) if token != pad][:4]])
    values_N = TokenValues(model)(ForwardInput(tokens_BT, torch.arange(4), tokens_BT[0]))
    for end in range(1, 5):
        expected = model(input_ids=tokens_BT[:, :end], use_cache=False).logits.float()[0, 0]
        if not torch.allclose(values_N[end - 1], expected, rtol=1e-2, atol=1e-2):
            raise BadInput(
                f"critic {source}: {type(model).__name__} returns {float(expected):.4g} for a text but "
                f"{float(values_N[end - 1]):.4g} for the same text at the start of a longer one, so its values depend "
                "on later tokens. Use a causal decoder whose score is a linear layer over the hidden states"
            )
