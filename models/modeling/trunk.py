"""Trunk of a language model: the module below its head, which computes the last hidden states."""

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from rheostat.infra.errors import BadInput


def find_trunk(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module of a model that computes the last hidden states, to which the head is applied. Raises BadInput
    if there is no such module.

    transformers finds this module by `base_model_prefix`. In some classes (Llama 4) no attribute has this name, and
    transformers returns the whole model. This function then returns the decoder, or else the only other model inside
    the model.
    """
    candidates = [model.base_model, *(child for child in model.children() if isinstance(child, PreTrainedModel))]
    if hasattr(model, "get_decoder"):
        candidates.insert(1, model.get_decoder())
    trunk = next((each for each in candidates if each is not model and isinstance(each, nn.Module)), None)
    if trunk is None:
        raise BadInput(
            f"model {type(model).__name__} cannot be trained, because it has no inner module of transformers that "
            "returns the hidden states before the output layer. Use another architecture."
        )
    return cast(PreTrainedModel, trunk)
