"""Language-model head that computes log-probs of given tokens in chunks, so that the logits of a whole batch never
exist at once.

Shapes: N completion tokens, C completion tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel

from rheostat.infra.errors import BadInput
from rheostat.models.config.objectives import chunk_elements_of
from rheostat.models.modeling.logit_shapes import LogitShape, logit_shape
from rheostat.models.modeling.trials import trial_weights, whole_shape
from rheostat.models.modeling.trunk import find_trunk
from rheostat.models.vision.tower import mask_tokens

LossGradient = Callable[[Tensor, Tensor], Tensor]
"""Function that returns the gradient of a micro-batch's loss with respect to the log-probs of some completion tokens.
Its arguments are these log-probs and the tokens' indices in the micro-batch, both of the same length."""


class TopTokens(NamedTuple):
    """Choice of the most probable tokens at each position, which a teacher returns in addition to the log-prob of the
    target token."""

    tokens: int
    """Number of tokens (k) per position."""
    vocab_size: int
    """Number of token IDs from which they are chosen, which is the size of the policy's vocabulary. The teacher may
    have more."""


class HeadSettings(NamedTuple):
    """Settings for computing log-probs from the output of a language-model head: logit scale, temperature, banned
    tokens and chunk size."""

    shape: LogitShape
    temperature: float
    banned: tuple[int, ...]
    """IDs of the tokens that always get probability 0."""
    rows: int = 1
    """Number of tokens for which logits are computed at a time (a chunk)."""

    def logits(self, raw: Tensor) -> Tensor:
        """Return the model's logits in float32, given the `raw` output of the head. Logits of banned tokens are
        -inf."""
        return mask_tokens(self.shape.apply(raw.float()), self.banned)

    def logprobs(self, logits_CV: Tensor, targets_C: Tensor) -> Tensor:
        """Return the log-probs of the target tokens, given logits of shape (tokens, vocabulary). The temperature is
        applied."""
        return -F.cross_entropy(logits_CV / self.temperature, targets_C, reduction="none")

    def candidate_logprobs(self, logits_CV: Tensor, candidates_CS: Tensor) -> Tensor:
        """Return the log-probs of the candidate tokens at each position, of the shape of `candidates_CS`. The
        temperature is applied."""
        return (logits_CV / self.temperature).log_softmax(-1).gather(-1, candidates_CS)

    def top_logprobs(self, logits_CV: Tensor, targets_C: Tensor, top: TopTokens) -> Tensor:
        """Return for each position the log-prob of the target token, the log-probs of the most probable tokens, and the
        IDs of these tokens as floats (1 + 2k numbers)."""
        scaled_CV = logits_CV / self.temperature
        best = scaled_CV[:, : top.vocab_size].topk(top.tokens, dim=-1)
        logprobs_CK = best.values - scaled_CV.logsumexp(-1, keepdim=True)
        return torch.cat([self.logprobs(logits_CV, targets_C)[:, None], logprobs_CK, best.indices.float()], dim=-1)

    def compute_candidate_gradients(self, logits_CV: Tensor, candidates_CS: Tensor, gradients_CS: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the head's output, of shape (tokens, vocabulary).
        `gradients_CS` is the gradient of the loss with respect to the log-probs of the candidate tokens."""
        gradients_CV = (logits_CV / self.temperature).softmax(-1)
        gradients_CV.mul_(-gradients_CS.sum(-1, keepdim=True)).scatter_add_(-1, candidates_CS, gradients_CS)
        return self._differentiate_shape(gradients_CV.div_(self.temperature), logits_CV)

    def compute_logit_gradients(self, logits_CV: Tensor, targets_C: Tensor, gradients_C1: Tensor | float) -> Tensor:
        """Return the gradient of the loss with respect to the head's output, of shape (tokens, vocabulary).
        `gradients_C1` is the gradient of the loss with respect to the log-probs of the target tokens."""
        gradients_CV = (logits_CV / self.temperature).softmax(-1)
        gradients_CV[torch.arange(len(gradients_CV), device=gradients_CV.device), targets_C] -= 1
        gradients_CV.mul_(-gradients_C1 / self.temperature)
        return self._differentiate_shape(gradients_CV, logits_CV)

    def entropies(self, logits_CV: Tensor) -> Tensor:
        """Return the entropy of the next token over the whole vocabulary in nats (C), given logits of shape (tokens,
        vocabulary). The temperature is applied, and banned tokens have probability 0."""
        logprobs_CV = self._bounded_logprobs(logits_CV)
        return -(logprobs_CV.exp() * logprobs_CV).sum(-1)

    def compute_entropy_gradients(self, logits_CV: Tensor, gradients_C1: Tensor) -> Tensor:
        """Return the gradient of the loss with respect to the head's output, of shape (tokens, vocabulary).
        `gradients_C1` is the gradient of the loss with respect to the entropies.

        The derivative of the entropy H with respect to the logit of a token with probability p is −p (log p + H).
        """
        logprobs_CV = self._bounded_logprobs(logits_CV)
        gradients_CV = logprobs_CV.exp()
        entropies_C1 = -(gradients_CV * logprobs_CV).sum(-1, keepdim=True)
        gradients_CV.mul_(logprobs_CV.add_(entropies_C1)).mul_(-gradients_C1 / self.temperature)
        return self._differentiate_shape(gradients_CV, logits_CV)

    def _bounded_logprobs(self, logits_CV: Tensor) -> Tensor:
        """Return all log-probs (C x V). Log-probs of -inf are raised to -1e4, at which the probability is 0, too."""
        return (logits_CV / self.temperature).log_softmax(-1).clamp_(min=-1e4)

    def _differentiate_shape(self, gradients_CV: Tensor, logits_CV: Tensor) -> Tensor:
        """Turn gradients with respect to logits into gradients with respect to the head's output, in place."""
        if self.shape != LogitShape():
            gradients_CV.mul_(self.shape.compute_derivative(logits_CV)).masked_fill_(logits_CV.isinf(), 0)
        return gradients_CV


@cache
def elements_on(device: torch.device) -> int:
    """Return the maximum number of logits (tokens times vocabulary) that are computed at a time on a device.

    The number depends on the device's total memory and not on its free memory, because head gradients are summed chunk
    by chunk, and another chunk size would change their bits.
    """
    return chunk_elements_of(torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None)


class LogprobHead(nn.Module):
    """Language-model head that computes log-probs chunk by chunk, only at positions that predict completion tokens. It
    uses the model's own head parameters."""

    def __init__(
        self, model: PreTrainedModel, *, temperature: float, banned: Sequence[int], chunk_elements: int | None
    ) -> None:
        super().__init__()
        head, shape = _find_linear_head(model, banned)
        # Also registered here, so that ZeRO-3 gathers them around this module's forward and backward passes.
        self.weight = head.weight
        self.bias = head.bias
        self.chunk_elements, self.vocab_size = chunk_elements, whole_shape(head.weight)[0]
        self.settings = HeadSettings(shape, temperature, tuple(banned))

    def forward(
        self,
        states_NH: Tensor,
        targets_N: Tensor,
        loss_gradient: LossGradient | None = None,
        *,
        with_entropy: bool = False,
        candidates_NK: Tensor | None = None,
        top: TopTokens | None = None,
    ) -> Tensor:
        """Return the log-prob of each target token (N). With `with_entropy`, return log-probs and entropies (N x 2).
        With `candidates_NK`, return the log-probs of the target and of these K tokens (N x (1 + K)). With `top`, return
        the rows of `HeadSettings.top_logprobs`, without gradients."""
        elements = self.chunk_elements or elements_on(states_NH.device)
        settings = self.settings._replace(rows=max(1, elements // self.vocab_size))
        if with_entropy:  # needs twice as many tensors of a chunk's size
            settings = settings._replace(rows=max(1, settings.rows // 2))
            return _apply(_ChunkedOutputs, states_NH, self.weight, self.bias, targets_N, settings, _ENTROPIES)
        if top is not None:
            return self._find_top(states_NH, targets_N, settings, top)
        if candidates_NK is not None:
            candidates_NS = torch.cat([targets_N[:, None], candidates_NK], dim=-1)
            return _apply(_ChunkedOutputs, states_NH, self.weight, self.bias, candidates_NS, settings, _CANDIDATES)
        if len(states_NH) <= settings.rows:
            logits_NV = self.settings.logits(F.linear(states_NH, self.weight, self.bias))
            if self.settings.temperature != 1:
                logits_NV = logits_NV / self.settings.temperature
            return -F.cross_entropy(logits_NV, targets_N, reduction="none")
        learns = self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)
        if not (torch.is_grad_enabled() and states_NH.requires_grad):
            loss_gradient = None
        elif not learns:
            return _apply(_FrozenLogprobs, states_NH, self.weight, self.bias, targets_N, settings)
        if loss_gradient is not None:
            return _apply(_FusedLogprobs, states_NH, self.weight, self.bias, targets_N, settings, loss_gradient)
        return _apply(_ChunkedOutputs, states_NH, self.weight, self.bias, targets_N, settings, _LOGPROBS)

    @torch.no_grad()
    def _find_top(self, states_NH: Tensor, targets_N: Tensor, settings: HeadSettings, top: TopTokens) -> Tensor:
        parts = zip(torch.split(states_NH, settings.rows), torch.split(targets_N, settings.rows), strict=True)
        return torch.cat(
            [
                settings.top_logprobs(settings.logits(F.linear(states, self.weight, self.bias)), targets, top)
                for states, targets in parts
            ]
        )


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    return cast(Callable[..., Tensor], function.apply)(*arguments)


class _Gradients:
    """Gradients of the loss with respect to the head's parameters and the hidden states, accumulated chunk by chunk of
    tokens."""

    def __init__(self, states_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, needed: Sequence[bool]) -> None:
        self._states_NH, self._weight_VH, self._bias_V = states_NH, weight_VH, bias_V
        self._by_states_NH = torch.empty_like(states_NH)
        self._by_weight_VH, self._by_bias_V = (
            torch.zeros_like(parameter, dtype=torch.float32) if need and parameter is not None else None
            for parameter, need in zip((weight_VH, bias_V), needed, strict=True)
        )

    def add(self, part: slice, gradients_CV: Tensor) -> None:
        """Add the gradients of one chunk. `part` selects the chunk's tokens, and `gradients_CV` is the gradient of the
        loss with respect to the head's output for them (tokens x vocabulary)."""
        low_CV = gradients_CV.to(self._states_NH.dtype)
        self._by_states_NH[part] = low_CV @ self._weight_VH
        if self._by_weight_VH is not None:
            self._by_weight_VH += low_CV.T @ self._states_NH[part]
        if self._by_bias_V is not None:
            self._by_bias_V += gradients_CV.sum(0)

    def found(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the accumulated gradients of the loss with respect to the states, the head's weight and its bias. A
        gradient that is not needed is None."""
        by_weight_VH, by_bias_V = self._by_weight_VH, self._by_bias_V
        return (
            self._by_states_NH,
            None if by_weight_VH is None else by_weight_VH.to(self._weight_VH.dtype),
            None if by_bias_V is None or self._bias_V is None else by_bias_V.to(self._bias_V.dtype),
        )


class _Outputs(NamedTuple):
    """Function of the logits that `_ChunkedOutputs` computes for each token, and its gradient."""

    compute: Callable[[HeadSettings, Tensor, Tensor], Tensor]
    """Function that returns the outputs of a chunk, given its logits and targets."""
    differentiate: Callable[[HeadSettings, Tensor, Tensor, Tensor], Tensor]
    """Function that returns the gradient of the loss with respect to the head's output (C x V), given logits, targets
    and the gradient of the loss with respect to the outputs of a chunk."""


def _differentiate_logprobs(
    settings: HeadSettings, logits_CV: Tensor, targets_C: Tensor, gradients_C: Tensor
) -> Tensor:
    return settings.compute_logit_gradients(logits_CV, targets_C, gradients_C[:, None])


def _compute_entropies(settings: HeadSettings, logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Return log-probs and entropies (C x 2)."""
    return torch.stack([settings.logprobs(logits_CV, targets_C), settings.entropies(logits_CV)], dim=-1)


def _differentiate_entropies(
    settings: HeadSettings, logits_CV: Tensor, targets_C: Tensor, gradients_C2: Tensor
) -> Tensor:
    gradients_CV = settings.compute_logit_gradients(logits_CV, targets_C, gradients_C2[:, :1])
    return gradients_CV.add_(settings.compute_entropy_gradients(logits_CV, gradients_C2[:, 1:]))


_LOGPROBS: Final = _Outputs(HeadSettings.logprobs, _differentiate_logprobs)
_ENTROPIES: Final = _Outputs(_compute_entropies, _differentiate_entropies)
_CANDIDATES: Final = _Outputs(HeadSettings.candidate_logprobs, HeadSettings.compute_candidate_gradients)


class _ChunkedContext(FunctionCtx):
    """Autograd context of `_ChunkedOutputs`: the tensors and settings that its forward pass keeps for the backward
    pass."""

    saved_tensors: tuple[Tensor, Tensor, Tensor | None, Tensor]
    settings: HeadSettings
    outputs: _Outputs
    needs_input_grad: tuple[bool, ...]


class _ChunkedOutputs(torch.autograd.Function):
    """Autograd function that computes outputs from hidden states chunk by chunk. The backward pass computes the logits
    again, because they are not kept."""

    @staticmethod
    def forward(
        ctx: _ChunkedContext,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets: Tensor,
        settings: HeadSettings,
        outputs: _Outputs,
    ) -> Tensor:
        ctx.save_for_backward(states_NH, weight_VH, cast(Tensor, bias_V), targets)  # None is allowed
        ctx.settings, ctx.outputs = settings, outputs
        parts = zip(torch.split(states_NH, settings.rows), torch.split(targets, settings.rows), strict=True)
        chunks = [
            outputs.compute(settings, settings.logits(F.linear(states, weight_VH, bias_V)), chunk)
            for states, chunk in parts
        ]
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: _ChunkedContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        states_NH, weight_VH, bias_V, targets = ctx.saved_tensors
        gradient_sums, settings = _Gradients(states_NH, weight_VH, bias_V, ctx.needs_input_grad[1:3]), ctx.settings
        for start in range(0, len(states_NH), settings.rows):
            part = slice(start, start + settings.rows)
            logits = settings.logits(F.linear(states_NH[part], weight_VH, bias_V))
            gradient_sums.add(part, ctx.outputs.differentiate(settings, logits, targets[part], gradients[0][part]))
        return *gradient_sums.found(), None, None, None


class _FusedContext(FunctionCtx):
    """Autograd context of `_FusedLogprobs`, with the gradients that the forward pass has already computed."""

    saved_tensors: tuple[Tensor, Tensor | None, Tensor | None]
    needs_input_grad: tuple[bool, ...]


class _FusedLogprobs(torch.autograd.Function):
    """Autograd function that computes log-probs and all gradients in the forward pass, chunk by chunk, while a chunk's
    logits exist. It is used if the head is trained and the per-token gradient of the loss is a known function, so that
    the gradient that the backward pass would receive is known in advance."""

    @staticmethod
    def forward(
        ctx: _FusedContext,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: HeadSettings,
        loss_gradient: LossGradient,
    ) -> Tensor:
        gradient_sums, chunks = _Gradients(states_NH, weight_VH, bias_V, ctx.needs_input_grad[1:3]), list[Tensor]()
        places_N = torch.arange(len(states_NH), device=states_NH.device)
        for start in range(0, len(states_NH), settings.rows):
            part = slice(start, start + settings.rows)
            logits = settings.logits(F.linear(states_NH[part], weight_VH, bias_V))
            chunks.append(settings.logprobs(logits, targets_N[part]))
            loss_gradients_C1 = loss_gradient(chunks[-1], places_N[part])[:, None]
            gradient_sums.add(part, settings.compute_logit_gradients(logits, targets_N[part], loss_gradients_C1))
        ctx.save_for_backward(*cast(tuple[Tensor, Tensor, Tensor], gradient_sums.found()))  # None is allowed
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: _FusedContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.saved_tensors, None, None, None


class _FrozenContext(FunctionCtx):
    """Autograd context of `_FrozenLogprobs`, with the gradients of the log-probs with respect to the hidden states."""

    saved_tensors: tuple[Tensor]
    needs_input_grad: tuple[bool, ...]


class _FrozenLogprobs(torch.autograd.Function):
    """Autograd function that computes log-probs chunk by chunk with a frozen head, for example if only adapters are
    trained.

    The loss only scales the gradient of a token's log-prob with respect to its state. The forward pass therefore
    computes this gradient while the logits exist, and keeps it (it has the size of the states). Nothing is recomputed.
    """

    @staticmethod
    def forward(
        ctx: _FrozenContext,
        states_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        settings: HeadSettings,
    ) -> Tensor:
        directions_NH, chunks = torch.empty_like(states_NH), list[Tensor]()
        for start in range(0, len(states_NH), settings.rows):
            part = slice(start, start + settings.rows)
            logits = settings.logits(F.linear(states_NH[part], weight_VH, bias_V))
            chunks.append(settings.logprobs(logits, targets_N[part]))
            directions_NH[part] = (
                settings.compute_logit_gradients(logits, targets_N[part], 1).to(states_NH.dtype) @ weight_VH
            )
        ctx.save_for_backward(directions_NH)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx: _FrozenContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (directions_NH,) = ctx.saved_tensors
        return (gradients[0][:, None] * directions_NH).to(directions_NH.dtype), None, None, None, None


def _find_linear_head(model: PreTrainedModel, banned: Sequence[int]) -> tuple[nn.Linear, LogitShape]:
    """Return a model's linear output layer and the function (scale and soft cap) that the model applies to its output.
    Raises BadInput if the logits depend on anything else."""
    head = model.get_output_embeddings()
    plain = [token for token in range(4 + len(banned)) if token not in banned][:4]
    tokens_BT = torch.tensor([plain], device=model.device)
    with torch.no_grad(), trial_weights(model):
        if isinstance(head, nn.Linear) and (shape := logit_shape(model, head, tokens_BT)) is not None:
            expected = model(input_ids=tokens_BT, use_cache=False).logits
            states_BTH = find_trunk(model)(input_ids=tokens_BT, use_cache=False).last_hidden_state
            computed = shape.apply(head(states_BTH).float())
            if torch.allclose(expected.float(), computed, rtol=1e-2, atol=1e-2, equal_nan=True):
                return head, shape
    raise BadInput(
        f"model {type(model).__name__} cannot be trained, because its logits are not a linear layer of the last "
        "hidden states, followed by at most a scale or a soft cap. Use another architecture"
    )
