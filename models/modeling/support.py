"""Checks whether a model's class supports training and decoding, by trial forward passes without weights.

The model is on the `meta` device, where a forward pass computes only shapes. Some classes read values in their forward
pass, which is impossible there. Such an error is no evidence against the class, so it is ignored.
"""

import importlib.util
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, get_args, get_type_hints

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import ModelOutput

from rheostat.infra.errors import BadInput
from rheostat.models.modeling.merging import find_base, is_adapter
from rheostat.models.modeling.trunk import find_trunk

DEQUANTIZED: Final = {"compressed-tensors": ("run_compressed", False)}
"""Name and value of the setting in `quantization_config` with which transformers loads unquantized weights, by
quantization method. All other methods use `dequantize = true`."""
PACKAGES: Final = ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")
"""Quantization methods that have no setting with which transformers loads unquantized weights."""


class _Unsupported(Exception):
    """Raised when a trial shows that a model does something that training or decoding does not support."""


def check_trainable(model: PreTrainedModel, *, source: str) -> None:
    """Raise BadInput if a model on the `meta` device cannot be trained. The message begins with `source`."""
    try:
        trunk = find_trunk(model)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error
    head = model.get_output_embeddings()
    problem = "" if isinstance(head, nn.Linear) else "its output layer is not a linear layer"
    problem = problem or _find_error(model, lambda tokens_BT: _read_states(trunk, tokens_BT))
    problem = problem or _find_error(model, lambda tokens_BT: _compute_logits(model, tokens_BT))
    if problem:
        raise BadInput(f"{source}: {type(model).__name__} cannot be trained: {problem}. Use another architecture.")


def describe_decoding_conflict(model: PreTrainedModel) -> str:
    """Return the reason why the engine `transformers` cannot decode with a model, or "" if no reason is known."""
    if "past_key_values" not in inspect.signature(model.forward).parameters or not _returns_cache(model):
        return "its class has no KV cache (past_key_values)"
    return _find_error(model, lambda tokens_BT: _decode_one_token(model, tokens_BT))


def _returns_cache(model: PreTrainedModel) -> bool:
    """Return whether a model's forward pass may return a KV cache. It is False if the return annotation names an output
    class without a cache (RecurrentGemma)."""
    output = get_type_hints(type(model).forward).get("return")
    kinds = [kind for kind in (output, *get_args(output)) if isinstance(kind, type) and issubclass(kind, ModelOutput)]
    return not kinds or any("past_key_values" in getattr(kind, "__dataclass_fields__", ()) for kind in kinds)


def check_not_quantized(directory: Path) -> None:
    """Raise BadInput if the policy's weights would be loaded in quantized form, because they cannot be trained then."""
    path = (find_base(directory) if is_adapter(directory) else directory) / "config.json"
    settings = json.loads(path.read_text()).get("quantization_config") if path.is_file() else None
    if not isinstance(settings, dict):
        return
    method = str(settings.get("quant_method"))
    name, value = DEQUANTIZED.get(method, ("dequantize", True))
    if method in PACKAGES or settings.get(name) is not value:
        raise BadInput(
            f"policy {directory}: config.json sets quantization_config (quant_method {method!r}), but quantized "
            "weights cannot be trained. Use the checkpoint that is not quantized, or remove quantization_config if "
            "the weights are stored as floating-point numbers."
        )


def find_slow_chunk(model: PreTrainedModel) -> int:
    """Return the chunk length, in tokens, of state-space (Mamba) layers that run without a fast kernel. Returns 0 if
    the model has no such layers or the package mamba_ssm is installed.

    transformers pads sequences to a multiple of this length. The reference implementation computes the square of it per
    head and chunk, also for short sequences.
    """
    if importlib.util.find_spec("mamba_ssm") or not any("Mamba" in type(part).__name__ for part in model.modules()):
        return 0
    config = model.config.get_text_config()
    sizes = (getattr(config, name, None) for name in ("mamba_chunk_size", "chunk_size"))
    return next((size for size in sizes if isinstance(size, int)), 0)


def _read_states(trunk: PreTrainedModel, tokens_BT: Tensor) -> None:
    """Run the forward pass of the model without its head, as in training. Raises AttributeError if its output contains
    no hidden states."""
    _ = trunk(input_ids=tokens_BT, use_cache=False).last_hidden_state.shape


def _compute_logits(model: PreTrainedModel, tokens_BT: Tensor) -> None:
    """Compute logits. Raises _Unsupported if the output layer is not applied directly to the last hidden states."""
    trunk, head = find_trunk(model), model.get_output_embeddings()
    inner, called = {id(module) for module in trunk.modules()}, list[str]()
    others = {name: module for name, module in model.named_modules() if id(module) not in inner and module is not head}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, module in others.items()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        model(input_ids=tokens_BT)  # without a cache, more classes read values
    except (AttributeError, LookupError, TypeError, ValueError):
        return  # errors of the cache do not concern training
    finally:
        for hook in hooks:
            hook.remove()
    if called:
        raise _Unsupported(
            f"{called[0]} changes the last hidden states before the output layer reads them, but training needs the "
            "hidden states that the output layer reads"
        )


def _decode_one_token(model: PreTrainedModel, tokens_BT: Tensor) -> None:
    """Try decoding: process two prompts, repeat the rows of the KV cache, and decode one more token in each row. Errors
    are not caught."""
    cache = model(input_ids=tokens_BT, use_cache=True, logits_to_keep=1).past_key_values
    if isinstance(cache, DynamicCache) and type(cache) is not DynamicCache:
        # MiniMax keeps recurrent states next to the layers. They are not reordered, and later tokens see the padding.
        raise _Unsupported(
            f"its cache, {type(cache).__name__}, contains states that do not belong to a layer, so the rows of a "
            "batch cannot be reordered"
        )
    rows_R = torch.tensor([0, 0, 1], device=tokens_BT.device)
    cache.reorder_cache(rows_R)
    positions_R1 = torch.full((len(rows_R), 1), tokens_BT.shape[1], device=tokens_BT.device)
    model(
        input_ids=tokens_BT[rows_R, :1],
        position_ids=positions_R1,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )


@torch.no_grad()
def _find_error(model: PreTrainedModel, call: Callable[[Tensor], None]) -> str:
    """Call `call` with two rows of four token IDs, and return the message of the error that it raises, or "" if it
    raises none. Errors that only occur on the `meta` device are ignored."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default needs bfloat16 on the meta device
    try:
        call(torch.zeros(2, 4, dtype=torch.int64, device="meta"))
    except _Unsupported as error:
        return str(error)
    except (RuntimeError, NotImplementedError, AssertionError):
        return ""
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        return f"running it failed ({' '.join(str(error).split())[:200]})"
    return ""
