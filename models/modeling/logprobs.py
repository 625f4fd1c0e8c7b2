"""Models that say one number of each token; log-probs without ever holding the logits of a whole batch.

Shapes: B rows, T padded width, N written tokens, C those of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from infra.errors import BadInput
from infra.store.bundles import BundledFile
from models.config.attention import Attention
from models.config.objectives import chunk_elements_of
from models.modeling.experts import ExpertRouting, watch_routers
from models.modeling.layout import MicroBatch, lay_out
from models.modeling.logit_shapes import LogitShape, logit_shape
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
from models.vision.sight import SeenRows, Sight, look, see, without


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
        self.head = _Head(model, temperature=temperature, banned=banned, chunk_elements=chunk_elements)
        self.shares_prompts = attend(model, attention)
        self.routing = watch_routers(model)
        self.replay = ExpertReplay(model) if replays_experts else None

    def forward(self, read: ForwardInput) -> Tensor:
        """Return log π of each written token in float32."""
        if self.routing is not None:
            self.routing.begin(read.positions_N)
        if self.replay is not None:
            self.replay.begin(read.chosen_LF)
        return read.gathered(self.head(self.states(read), read.targets_N))


class _Settings(NamedTuple):
    """How what the head says becomes log-probs."""

    shape: LogitShape
    temperature: float
    banned: tuple[int, ...]
    """Tokens whose probability is 0."""
    rows: int = 1
    """Tokens of a chunk."""

    def logits(self, raw: Tensor) -> Tensor:
        """Return the model's logits in float32, without tokens that are banned."""
        return without(self.shape.apply(raw.float()), self.banned)

    def logprobs(self, logits_CV: Tensor, targets_C: Tensor) -> Tensor:
        """Return the log-probs of a chunk's targets."""
        return -F.cross_entropy(logits_CV / self.temperature, targets_C, reduction="none")

    def slopes(self, logits_CV: Tensor, targets_C: Tensor, gradients_C1: Tensor | float) -> Tensor:
        """Return how what the head says changes a loss that changes so with the log-probs of a chunk's targets."""
        slopes_CV = (logits_CV / self.temperature).softmax(-1)
        slopes_CV[torch.arange(len(slopes_CV), device=slopes_CV.device), targets_C] -= 1
        slopes_CV.mul_(-gradients_C1 / self.temperature)
        if self.shape != LogitShape():
            slopes_CV.mul_(self.shape.slope(logits_CV)).masked_fill_(logits_CV.isinf(), 0)
        return slopes_CV


@cache
def elements_on(device: torch.device) -> int:
    """Logits that a chunk may have on a device: by all of its memory, never by what is free, which would change bits.

    The gradient of the head is summed chunk by chunk.
    """
    return chunk_elements_of(torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None)


class _Head(nn.Module):
    """The language-model head on completion positions alone; it shares the model's own parameters."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, banned: Sequence[int], chunk_elements: int | None
    ) -> None:
        super().__init__()
        head, shape = _linear_head(model, banned)
        # Registered here too, so that ZeRO-3 gathers them around this module's forward and backward.
        self.weight = head.weight
        self.bias = head.bias
        self.chunk_elements, self.vocab_size = chunk_elements, head.weight.shape[0]
        self.settings = _Settings(shape, temperature, tuple(banned))

    def forward(self, states_NH: Tensor, targets_N: Tensor) -> Tensor:
        elements = self.chunk_elements or elements_on(states_NH.device)
        settings = self.settings._replace(rows=max(1, elements // self.vocab_size))
        if len(states_NH) <= settings.rows:
            logits_NV = self.settings.logits(F.linear(states_NH, self.weight, self.bias))
            if self.settings.temperature != 1:
                logits_NV = logits_NV / self.settings.temperature
            return -F.cross_entropy(logits_NV, targets_N, reduction="none")
        learns = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        frozen = not learns and states_NH.requires_grad and torch.is_grad_enabled()
        chunked = cast(_Chunked, (_FrozenLogprobs if frozen else _ChunkedLogprobs).apply)
        return chunked(states_NH, self.weight, self.bias, targets_N, settings)


_Chunked = Callable[[Tensor, Tensor, Tensor | None, Tensor, _Settings], Tensor]


class _Saved(FunctionCtx):
    """What the forward pass leaves for the backward pass."""

    saved_tensors: tuple[Tensor, Tensor, Tensor | None, Tensor]
    settings: _Settings
    needs_input_grad: tuple[bool, ...]


class _ChunkedLogprobs(torch.autograd.Function):
    """Chunk after chunk of tokens; the backward pass computes the logits again rather than keep them."""

    @staticmethod
    def forward(
        ctx: _Saved,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: _Settings,
    ) -> Tensor:
        ctx.save_for_backward(states_NH, weight_VH, cast(Tensor, bias_V), targets_N)  # none is allowed
        ctx.settings = settings
        parts = zip(torch.split(states_NH, settings.rows), torch.split(targets_N, settings.rows), strict=True)
        chunks = [
            settings.logprobs(settings.logits(F.linear(states, weight_VH, bias_V)), targets)
            for states, targets in parts
        ]
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: _Saved, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        grad_states_NH = torch.empty_like(states_NH)
        grad_weight_VH, grad_bias_V = (
            torch.zeros_like(parameter, dtype=torch.float32) if needed and parameter is not None else None
            for parameter, needed in zip((weight_VH, bias_V), ctx.needs_input_grad[1:3], strict=True)
        )
        settings = ctx.settings
        for start in range(0, len(states_NH), settings.rows):
            part = slice(start, start + settings.rows)
            logits = settings.logits(F.linear(states_NH[part], weight_VH, bias_V))
            grad_logits = settings.slopes(logits, targets_N[part], gradients[0][part, None])
            low = grad_logits.to(states_NH.dtype)
            grad_states_NH[part] = low @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += low.T @ states_NH[part]
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(0)
        grad_weight = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        grad_bias = None if bias_V is None or grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_states_NH, grad_weight, grad_bias, None, None


class _Directions(FunctionCtx):
    """What the forward pass leaves where the head is frozen."""

    saved_tensors: tuple[Tensor]
    needs_input_grad: tuple[bool, ...]


class _FrozenLogprobs(torch.autograd.Function):
    """Chunk after chunk of tokens under a head that is not trained, as beside adapters.

    How a token's log-prob changes with its state does not depend on the loss, which only scales it: it is computed
    while the logits are there, and kept, as large as the states. Nothing is computed again.
    """

    @staticmethod
    def forward(
        ctx: _Directions,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: _Settings,
    ) -> Tensor:
        directions_NH, chunks = torch.empty_like(states_NH), list[Tensor]()
        for start in range(0, len(states_NH), settings.rows):
            part = slice(start, start + settings.rows)
            logits = settings.logits(F.linear(states_NH[part], weight_VH, bias_V))
            chunks.append(settings.logprobs(logits, targets_N[part]))
            directions_NH[part] = settings.slopes(logits, targets_N[part], 1).to(states_NH.dtype) @ weight_VH
        ctx.save_for_backward(directions_NH)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: _Directions, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (directions_NH,) = ctx.saved_tensors
        return (gradients[0][:, None] * directions_NH).to(directions_NH.dtype), None, None, None, None


def _linear_head(model: PreTrainedModel, banned: Sequence[int]) -> tuple[nn.Linear, LogitShape]:
    """Return the output layer and what follows it, after checking that logits are that and nothing else."""
    head = model.get_output_embeddings()
    plain = [token for token in range(4 + len(banned)) if token not in banned][:4]
    tokens_BT = torch.tensor([plain], device=model.device)
    if isinstance(head, nn.Linear) and (shape := logit_shape(model, head, tokens_BT)) is not None:
        with torch.no_grad():
            expected = model(input_ids=tokens_BT, use_cache=False).logits
            found = shape.apply(head(model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state).float())
        if torch.allclose(expected.float(), found, rtol=1e-2, atol=1e-2, equal_nan=True):
            return head, shape
    raise BadInput(
        f"model {type(model).__name__}: expected logits that are a linear layer of the last hidden states, with at "
        "most a scale or a soft cap behind it, found something else; the update worker cannot train it"
    )
