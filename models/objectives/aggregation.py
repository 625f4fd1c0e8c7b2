"""How the losses of tokens become one number: a weight per token, so that sums over ranks and passes need no more.

The weights are those of a whole minibatch, whatever part of it a rank or a forward pass holds.
"""

from collections.abc import Sequence

from models.config.objectives import Aggregation, ConstantMean, SequenceMean, TokenMean


def token_weights(aggregation: Aggregation, lengths: Sequence[int]) -> list[float]:
    """Weight of every token of each sequence, given the completion lengths of the whole minibatch.

    Sequences without a token count for nothing.
    """
    num_sequences = sum(length > 0 for length in lengths)
    match aggregation:
        case TokenMean():
            return [1 / max(1, sum(lengths))] * len(lengths)
        case SequenceMean():
            return [1 / (num_sequences * length) if length else 0.0 for length in lengths]
        case ConstantMean(length=constant):
            return [1 / (max(1, num_sequences) * constant)] * len(lengths)
