"""Models that compute one number per token, such as a log-prob. The logits of a whole batch never exist at once.

Shapes: B rows, T padded width, N completion tokens, C completion tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundledFile
from rheostat.models.config.attention import Attention
from rheostat.models.engines.requests import suppressed_tokens
from rheostat.models.modeling.checkpointing import checkpoint_layers
from rheostat.models.modeling.experts import ExpertRouting, record_router_outputs
from rheostat.models.modeling.head import LogprobHead, LossGradient, TopTokens
from rheostat.models.modeling.layout import MicroBatch, lay_out
from rheostat.models.modeling.policy import policy_shape
from rheostat.models.modeling.replayed_experts import ExpertReplay
from rheostat.models.modeling.safetensors import WHOLE, FileShare, save_pretrained
from rheostat.models.modeling.sequence_parallel import SequenceParallelGroup
from rheostat.models.modeling.shared_prompts import (
    SharedTokens,
    matches_padded_rows,
    on_device,
    set_attention,
    shared_states,
    supports_sequence_parallelism,
    uses_attention_kernel,
)
from rheostat.models.modeling.trials import trial_weights, trials_in
from rheostat.models.modeling.trunk import find_trunk
from rheostat.models.vision.tower import ImageRows, VisionInputs, encode_images, prepare_rows


class ForwardInput(NamedTuple):
    """Tensors for one forward pass. The class is a tuple, because DeepSpeed's hooks find tensors only in tuples."""

    tokens_BT: Tensor
    """Token IDs: rows padded on the right, or one row that contains shared prompts once (if `shared` is set). No mask
    is needed, because causal attention never uses later tokens."""
    positions_N: Tensor
    """For each completion token, the index in the flattened `tokens_BT` of the state that predicts it."""
    targets_N: Tensor
    shared: SharedTokens | None = None
    """Indices for attention if `tokens_BT` is one row that contains shared prompts once, or None if rows are padded."""
    images: ImageRows | None = None
    """Images in the rows, or None for a text-only model."""
    chosen_LF: Tensor | None = None
    """Experts that the mixture-of-experts routers must use for each token, or None if routers choose freely."""
    own_M: Tensor | None = None
    """Indices of the completion tokens that this rank predicts if ranks share the tokens of a row (sequence
    parallelism), else None. If set, positions and targets cover only these tokens."""
    num_tokens: int = 0
    """Number of completion tokens in the whole micro-batch, over all ranks that share it."""
    loss_gradient: LossGradient | None = None
    """Function that returns the gradient of the loss with respect to each token's log-prob, or None if unknown. With
    it, the head computes gradients in the forward pass while the logits exist."""
    with_entropy: bool = False
    """Whether the entropy over the vocabulary is also computed for each completion token."""
    candidates_NK: Tensor | None = None
    """IDs of further tokens (candidates) whose log-probs are computed at each position, or None. If set, the output has
    one column for the completion tokens and one for each of the K tokens."""
    top: TopTokens | None = None
    """Most probable tokens that are returned too, or None for those of `TokenLogprobs.top`, if there are any."""

    @classmethod
    def from_microbatch(
        cls,
        batch: MicroBatch,
        device: torch.device,
        *,
        shares: bool,
        sequence_parallel_group: SequenceParallelGroup | None = None,
        images: ImageRows | None = None,
    ) -> Self:
        """Move a micro-batch to the device: as one row without repeated prompts if the model supports this (`shares`),
        else as padded rows. With `sequence_parallel_group`, the result is this rank's slice of the row. If the
        micro-batch is empty, every rank gets all of its tokens."""
        tokens, positions, targets = batch.tokens_BT, batch.positions_N, batch.targets_N
        row, own, shared = batch.shared if shares else None, None, None
        if sequence_parallel_group is not None and batch.inputs:
            shared_row = batch.shared or lay_out(batch.inputs, in_one_row=True).shared
            assert shared_row is not None, "inputs that are laid out in one row share it"
            row, own = sequence_parallel_group.slice_row(shared_row)
            targets = targets[own]
        if row is not None:
            tokens, positions = row.tokens_L[None], row.predicting_N
            shared = on_device(row, device, sequence_parallel_group=sequence_parallel_group)
        tokens_BT, positions_N, targets_N = (
            torch.from_numpy(array).to(device) for array in (tokens, positions, targets)
        )
        own_M = None if own is None else torch.from_numpy(own).to(device)
        inputs = cls(tokens_BT, positions_N, targets_N, shared, images)
        return inputs._replace(own_M=own_M, num_tokens=len(batch.targets_N))

    def with_candidates(self, candidates_NK: Tensor) -> Self:
        """Return this input with the IDs of further tokens, given those of all completion tokens of the micro-batch."""
        return self._replace(candidates_NK=candidates_NK if self.own_M is None else candidates_NK[self.own_M])

    def own_loss_gradient(self) -> LossGradient | None:
        """Return `loss_gradient` for the completion tokens that this rank predicts: token indices start at 0 for the
        first of them."""
        loss_gradient, own_M = self.loss_gradient, self.own_M
        if loss_gradient is None or own_M is None:
            return loss_gradient
        return lambda logprobs_C, places_C: loss_gradient(logprobs_C, own_M[places_C])

    def gather_outputs(self, values: Tensor) -> Tensor:
        """Return the outputs for all completion tokens of the micro-batch. With sequence parallelism, they are gathered
        from all ranks that share the row. Collective in this case: all ranks of the group must call this."""
        if self.own_M is None or self.shared is None or self.shared.sequence_parallel_group is None:
            return values
        return self.shared.sequence_parallel_group.gather_outputs(values, self.own_M, num_tokens=self.num_tokens)


class TokenModule(nn.Module):
    """Model that returns one float32 number per completion token, given a `ForwardInput`."""

    model: PreTrainedModel
    """Underlying transformers or diffusers model, whose weights `save` writes."""

    shares_prompts: bool
    """Whether the model supports micro-batches in which a prompt that several sequences share is stored once."""

    vision: VisionInputs | None = None
    """Vision tower and image settings of a vision-language model, or None for a text-only model."""

    routing: ExpertRouting | None = None
    """Recorded router outputs of a mixture of experts, or None for a model without experts."""

    replay: ExpertReplay | None = None
    """Control that makes routers use the experts that were chosen when the completions were generated, or None if
    routers choose freely."""
    sequence_parallel_group: SequenceParallelGroup | None = None
    """Ranks that share the tokens of a row with this rank (sequence parallelism), or None if sequence parallelism is
    off."""
    vocab_size: int = 0
    """Number of token IDs of a language model's head, or 0 for models without such a head."""

    def enable_sequence_parallelism(self, group: SequenceParallelGroup | None) -> None:
        """Turn on sequence parallelism, with which the ranks of `group` share the tokens of a row, or leave it off if
        `group` is None. Collective: all ranks of the group must call this. Raises BadInput if the model does not
        support it."""
        if group is None:
            return
        kind = type(self.model).__name__
        shape = policy_shape(self.model.config, parameters=0, source=kind)
        replace(shape, slices=self.shares_prompts and supports_sequence_parallelism(self.model)).check_slices(
            group.size, what=kind
        )
        trial = trials_in(self.model.dtype) if uses_attention_kernel(self.model) else nullcontext()
        with trial, trial_weights(self.model):
            matches = matches_padded_rows(self.model, sequence_parallel_group=group)
        if not matches:
            raise BadInput(
                f"update.sequence_parallel is {group.size}, but {kind} computes other results if its sequences are "
                "split among ranks. Set it to 1"
            )
        self.sequence_parallel_group = group

    def prepare_inputs(self, batch: MicroBatch, device: torch.device) -> ForwardInput:
        """Move a micro-batch, with its images and recorded experts, to the device. Raises BadInput if the model is
        text-only and the micro-batch has images. Raises Damaged if the experts that routers must use were not recorded.
        """
        images = None
        if self.vision is not None:
            shows = batch.shared.prompts if self.shares_prompts and batch.shared is not None else batch.inputs
            width = batch.tokens_BT.shape[1]
            images = prepare_rows(self.vision, self.model, shows, device=device, width=width, runs_always=True)
        elif any(each.images for each in batch.inputs):
            raise BadInput(
                f"{type(self.model).__name__} reads only text, but the prompts have images. Use a vision-language "
                "policy, or remove data.images_column"
            )
        inputs = ForwardInput.from_microbatch(
            batch,
            device,
            shares=self.shares_prompts,
            sequence_parallel_group=self.sequence_parallel_group,
            images=images,
        )
        if self.replay is None:
            return inputs
        return inputs._replace(chosen_LF=self.replay.lay_out(batch, device, shares=self.shares_prompts))

    def prepare_inputs_without_replay(self, batch: MicroBatch, device: torch.device) -> ForwardInput:
        """Move a micro-batch to the device without the experts recorded during generation, so that routers choose
        freely."""
        return self.prepare_inputs(batch, device)._replace(chosen_LF=None)

    def checkpoint_layers(self, *, is_enabled: bool) -> None:
        """Turn on activation checkpointing if `is_enabled` is set.
        The gradients are the same either way, bit for bit.
        """
        if is_enabled:
            checkpoint_layers(self.model)

    denoising_steps: range = range(0)
    """Denoising steps that may be trained. The range is empty for language models."""

    @property
    def means(self) -> Tensor:
        """Means of the distributions of the next states, as a denoiser predicted them in the latest forward pass. Shape
        (denoising steps, values of a state)."""
        raise AssertionError(
            "a language model has no denoising steps. Only text-to-image policies predict the means of denoising states"
        )

    def divergence(self, means_ND: Tensor) -> Tensor:
        """Return the KL divergence of each denoising step of the latest forward pass from another denoiser, whose
        predicted means of the next states are `means_ND` (denoising steps x values of a state)."""
        raise AssertionError(
            "a language model has no denoising steps. Only text-to-image policies predict the means of denoising states"
        )

    def save(
        self,
        directory: Path,
        *,
        state: Mapping[str, Tensor] | None = None,
        share: FileShare = WHOLE,
        on_progress: Callable[[], None] = lambda: None,
    ) -> dict[str, BundledFile]:
        """Write the model's configuration and this rank's share of the weight files. Return the size and digest of each
        written weight file by name. `state` contains the weights if those of the model are sharded. `on_progress` is
        called after each chunk of the weights."""
        return save_pretrained(self.model, directory, state=state, share=share, on_progress=on_progress)

    def states(self, inputs: ForwardInput) -> Tensor:
        """Return the hidden state that predicts each completion token, of shape (completion tokens, hidden size)."""
        image_states = None if inputs.images is None else encode_images(self.model, inputs.images)
        options = {} if image_states is None else image_states.options
        if inputs.shared is not None:
            states_LH = shared_states(self.model, inputs.tokens_BT, inputs.shared, options=options)
        else:
            output = find_trunk(self.model)(input_ids=inputs.tokens_BT, use_cache=False, **options)
            states_LH = output.last_hidden_state.flatten(0, 1)
        # The end of a shared prompt is repeated. On GPUs, index_select would add its gradients in a random order.
        if states_LH.is_cuda:
            states_NH = states_LH[inputs.positions_N]
        else:
            states_NH = states_LH.index_select(0, inputs.positions_N)
        # Every rank needs gradients of the same parameters.
        if image_states is not None and image_states.zero_term is not None:
            states_NH = states_NH + image_states.zero_term.to(states_NH.dtype)
        return states_NH


class TokenLogprobs(TokenModule):
    """Causal language model that returns the log-probs of the completion tokens in its input instead of logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        vision: VisionInputs | None = None,
        replays_experts: bool = False,
        chunk_elements: int | None = None,
        attention: Attention | None = None,
        top: TopTokens | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.vision = vision
        banned = (*(() if vision is None else vision.banned), *_suppressed_tokens(model))
        self.head = LogprobHead(model, temperature=temperature, banned=banned, chunk_elements=chunk_elements)
        self.vocab_size = self.head.vocab_size
        self.top = top
        self.shares_prompts = set_attention(model, attention)
        self.routing = record_router_outputs(model)
        self.replay = ExpertReplay(model) if replays_experts else None

    def forward(self, inputs: ForwardInput) -> Tensor:
        """Return the log-prob of each completion token in float32, of shape (N,). With `with_entropy` or
        `candidates_NK` of the input, or with `top`, there are further columns (`LogprobHead.forward`)."""
        if self.routing is not None:
            self.routing.reset(inputs.positions_N)
        if self.replay is not None:
            self.replay.set_choices(inputs.chosen_LF)
        outputs = self.head(
            self.states(inputs),
            inputs.targets_N,
            inputs.own_loss_gradient(),
            with_entropy=inputs.with_entropy,
            candidates_NK=inputs.candidates_NK,
            top=inputs.top or self.top,
        )
        return inputs.gather_outputs(outputs)


def _suppressed_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the IDs of tokens that the model never generates, which generation_config.json lists. They have
    probability 0 in training as in the engines."""
    settings = model.generation_config
    return () if settings is None else suppressed_tokens(settings)
