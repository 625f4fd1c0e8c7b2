"""What can be trained: a model that says one number of each token, such as its log-prob or its value.

Shapes: B rows, T padded width, N named tokens.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel


class TokenModule(nn.Module):
    """A model that says one float32 number of each of the named tokens; rows are padded on the right."""

    model: PreTrainedModel
    """What is saved."""

    def forward(self, tokens_BT: Tensor, positions_N: Tensor, targets_N: Tensor) -> Tensor:
        """Return a number for each state named by its index into the flattened B·T, and the token that follows it."""
        raise NotImplementedError
