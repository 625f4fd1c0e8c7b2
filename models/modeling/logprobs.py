"""Models that say one number of each token; log-probs without ever holding the logits of a whole batch.

Shapes: B rows, T padded width, N written tokens, C those of a chunk, H hidden size, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from infra.errors import BadInput
from infra.store.bundles import BundledFile
from models.config.attention import Attention
from models.modeling.checkpointing import checkpoint_layers
from models.modeling.experts import ExpertRouting, watch_routers
from models.modeling.head import LogprobHead, Slopes
from models.modeling.layout import MicroBatch, lay_out
from models.modeling.policy import policy_shape
from models.modeling.replayed_experts import ExpertReplay
from models.modeling.safetensors import save_pretrained
from models.modeling.shared_prompts import (
    SharedTokens,
    attend,
    may_slice,
    on_device,
    says_the_same,
    shared_states,
)
from models.modeling.slices import Slicing
from models.vision.sight import SeenRows, Sight, look, see


class ForwardInput(NamedTuple):
    """What one forward pass reads, as tensors; a tuple, since DeepSpeed's hooks look for tensors in tuples."""

    tokens_BT: Tensor
    """Padded on the right: causal attention never sees the padding, so no mask is needed. Or the row of `shared`."""
    positions_N: Tensor
    """Index into the flattened B·T of the state that predicts each written token."""
    targets_N: Tensor
    shared: SharedTokens | None = None
    """Where the one row of tokens stands in attention; none where rows are padded."""
    seen: SeenRows | None = None
    """What the rows show, of a model that sees."""
    chosen_LF: Tensor | None = None
    """Experts that routers are to choose for each token that is read, where they are replayed."""
    own_M: Tensor | None = None
    """Of a slice of the row: which written tokens the states predict that are here; then positions and targets are
    theirs alone."""
    written: int = 0
    """Written tokens of the whole pass."""
    slopes: Slopes | None = None
    """Of a loss that is known token by token: the gradient of the head is then taken while its logits are there."""

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        device: torch.device,
        *,
        shares: bool,
        slicing: Slicing | None = None,
        seen: SeenRows | None = None,
    ) -> Self:
        """Bring a pass to the device, to a model that `shares` prompts or one that does not.

        With `slicing` it is this rank's slice; of an empty pass, in which nothing is learnt, every rank reads all.
        """
        tokens, positions, targets = batch.tokens_BT, batch.positions_N, batch.targets_N
        row, own, shared = batch.shared if shares else None, None, None
        if slicing is not None and batch.inputs:
            whole = batch.shared or lay_out(batch.inputs, in_one_row=True).shared
            assert whole is not None, "inputs that are laid out in one row are"
            row, own = slicing.cut(whole)
            targets = targets[own]
        if row is not None:
            tokens, positions = row.tokens_L[None], row.predicting_N
            shared = on_device(row, device, slicing=slicing)
        tokens_BT, positions_N, targets_N = (
            torch.from_numpy(array).to(device) for array in (tokens, positions, targets)
        )
        own_M = None if own is None else torch.from_numpy(own).to(device)
        read = cls(tokens_BT, positions_N, targets_N, shared, seen)
        return read._replace(own_M=own_M, written=len(batch.targets_N))

    def own_slopes(self) -> Slopes | None:
        """Of the written tokens that are predicted here, by their place among these."""
        slopes, own_M = self.slopes, self.own_M
        if slopes is None or own_M is None:
            return slopes
        return lambda logprobs_C, places_C: slopes(logprobs_C, own_M[places_C])

    def gathered(self, said: Tensor) -> Tensor:
        """Return what is said of all written tokens, whichever rank's slice predicts them."""
        if self.own_M is None or self.shared is None or self.shared.slicing is None:
            return said
        return self.shared.slicing.gathered(said, self.own_M, written=self.written)


class TokenModule(nn.Module):
    """A model that says one float32 number of each written token: its `forward` takes a `ForwardInput`."""

    model: PreTrainedModel
    """What is saved."""

    shares_prompts: bool
    """Whether it takes passes in which prompts are shared."""

    sight: Sight | None = None
    """Of a model that sees."""

    routing: ExpertRouting | None = None
    """Of a mixture of experts."""

    replay: ExpertReplay | None = None
    """Of one whose routers choose again what they chose in the rollout."""
    slicing: Slicing | None = None
    """The ranks that read every pass together; none where this one does it alone."""

    def slice_rows(self, slicing: Slicing | None) -> None:
        """Read every pass together with other ranks, which call this at once. Raises BadInput where that cannot be."""
        if slicing is None:
            return
        kind = type(self.model).__name__
        shape = policy_shape(self.model.config, parameters=0, source=kind)
        replace(shape, slices=self.shares_prompts and may_slice(self.model)).check_slices(slicing.size, what=kind)
        if not says_the_same(self.model, slicing=slicing):
            raise BadInput(f"update.sequence_parallel {slicing.size}: {kind} says something else of slices of a row")
        self.slicing = slicing

    def read(self, batch: MicroBatch, device: torch.device) -> ForwardInput:
        """Bring a pass to the device, with what its rows show."""
        seen = None
        if self.sight is not None:
            shows = batch.shared.prompts if self.shares_prompts and batch.shared is not None else batch.inputs
            width = batch.tokens_BT.shape[1]
            seen = look(self.sight, self.model, shows, device=device, width=width, runs_always=True)
        elif any(each.images for each in batch.inputs):
            raise BadInput(f"{type(self.model).__name__} reads text alone, found prompts with images")
        read = ForwardInput.of(batch, device, shares=self.shares_prompts, slicing=self.slicing, seen=seen)
        if self.replay is None:
            return read
        return read._replace(chosen_LF=self.replay.lay_out(batch, device, shares=self.shares_prompts))

    def read_anew(self, batch: MicroBatch, device: torch.device) -> ForwardInput:
        """Bring a pass to the device for a model whose routers choose themselves."""
        return self.read(batch, device)._replace(chosen_LF=None)

    def checkpoint_layers(self, *, again: bool) -> None:
        """Say whether layers are computed again in the backward pass; gradients are the same either way, to the bit."""
        if again:
            checkpoint_layers(self.model)

    denoising_steps: range = range(0)
    """Those that may be learnt, of a policy that draws."""

    @property
    def means(self) -> Tensor:
        """What a denoiser expected to come next at each step of the pass before, N x D."""
        raise AssertionError("a language model has no means")

    def divergence(self, means_ND: Tensor) -> Tensor:
        """The divergence of each step of the pass before from another denoiser's, which expected these means."""
        raise AssertionError("a language model has no means")

    def save(self, directory: Path) -> dict[str, BundledFile]:
        """Write the model, its weights whole; say what its files of weights are."""
        return save_pretrained(self.model, directory)

    def states(self, read: ForwardInput) -> Tensor:
        """Return the hidden state that predicts each written token."""
        seen = None if read.seen is None else see(self.model, read.seen)
        options = {} if seen is None else seen.options
        if read.shared is not None:
            states_LH = shared_states(self.model, read.tokens_BT, read.shared, options=options)
        else:
            output = self.model.base_model(input_ids=read.tokens_BT, use_cache=False, **options)
            states_LH = output.last_hidden_state.flatten(0, 1)
        states_NH = states_LH.index_select(0, read.positions_N)
        if seen is not None and seen.nothing is not None:  # every rank's pass has gradients of the same parameters
            states_NH = states_NH + seen.nothing.to(states_NH.dtype)
        return states_NH


class TokenLogprobs(TokenModule):
    """A causal language model that answers with the log-probs of given tokens instead of logits."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        sight: Sight | None = None,
        replays_experts: bool = False,
        chunk_elements: int | None = None,
        attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.sight = sight
        banned = () if sight is None else sight.banned
        self.head = LogprobHead(model, temperature=temperature, banned=banned, chunk_elements=chunk_elements)
        self.shares_prompts = attend(model, attention)
        self.routing = watch_routers(model)
        self.replay = ExpertReplay(model) if replays_experts else None

    def forward(self, read: ForwardInput) -> Tensor:
        """Return log π of each written token in float32."""
        if self.routing is not None:
            self.routing.begin(read.positions_N)
        if self.replay is not None:
            self.replay.begin(read.chosen_LF)
        return read.gathered(self.head(self.states(read), read.targets_N, read.own_slopes()))
