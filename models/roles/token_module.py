"""What can be trained: a model that says one number of each token, such as its log-prob or its value.

Shapes: B rows, T padded width, N named tokens.
"""

from torch import nn
from transformers import PreTrainedModel


class TokenModule(nn.Module):
    """A model that says one float32 number of each of the named tokens; rows are padded on the right.

    Its `forward(tokens_BT, positions_N, targets_N)` returns a number for each state named by its index into the
    flattened B·T, and the token that follows it.
    """

    model: PreTrainedModel
    """What is saved."""
