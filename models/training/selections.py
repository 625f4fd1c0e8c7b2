"""Token selections of the policy loss: the whole minibatch of each optimizer step, before the first step.

Shapes: T completion tokens of a minibatch, M those with a weight in the loss.
"""

from collections.abc import Sequence
from random import Random
from typing import cast

import numpy as np
import pyarrow as pa

from rheostat.infra.plugins import find_target
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.modeling.batching import StepPlan
from rheostat.models.objectives.selection import SelectionFunction
from rheostat.models.records.columns import Mask, flat, lengths_of
from rheostat.models.records.model_input import trained_tokens_mask
from rheostat.models.records.seeds import derive_seed
from rheostat.models.training.samples import TrainingSamples


def select_tokens(
    samples: TrainingSamples, plans: Sequence[StepPlan], *, config: UpdateConfig, seed: int
) -> dict[int, Mask] | None:
    """Return the selected tokens of each sample by row number, with one value per trained token. Return None if the
    loss selects no tokens.

    Each minibatch is selected from as a whole. Tokens that are too stale for `max_staleness` are not selected, and they
    do not count. The result depends only on the samples, the minibatches and `seed`.
    """
    if config.loss.selection is None:
        return None
    select = cast(SelectionFunction, find_target(config.loss.selection, where=f"{config.loss.label!r}"))
    selected: dict[int, Mask] = {}
    for index, plan in enumerate(plans):
        table = samples.table.select(["logprobs", "advantages", "staleness"]).take(pa.array(plan.rows, pa.int64()))
        ages_T, trained_T = flat(table["staleness"]), trained_tokens_mask(table)
        counted_T = trained_T if config.max_staleness is None else trained_T & (ages_T <= config.max_staleness)
        selected_T = np.zeros(len(ages_T), np.bool_)
        selected_T[counted_T] = select(
            *(flat(table[name])[counted_T].astype(np.float32) for name in ("logprobs", "advantages")),
            config=config.loss,
            rng=Random(derive_seed(seed, index)),
        )
        ends = np.cumsum(lengths_of(table["staleness"]))[:-1]
        parts = zip(np.split(selected_T, ends), np.split(trained_T, ends), strict=True)
        selected |= {row: part[trained] for row, (part, trained) in zip(plan.rows, parts, strict=True)}
    return selected
