"""Rules for all models of a job that are computed from earlier policies. Torch-free."""

from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.divergence import ReferenceRule
from rheostat.models.config.objectives import UpdateConfig


def find_reference_rules(update: UpdateConfig, algorithm: Algorithm) -> dict[str, ReferenceRule]:
    """Return the rules for the reference of each KL penalty and for each teacher that is a moving average of the
    policies, by configuration key. A run stores one such model for all of them, so the rules must be equal."""
    penalties = {"update.kl": update.kl_penalty, "algorithm.kl": algorithm.reward_kl}
    rules = {key: penalty.rule for key, penalty in penalties.items() if penalty is not None}
    owners = {key: own for key, each in algorithm.all_teachers.items() if (own := each.privileged) is not None}
    return rules | {key: ReferenceRule(ema_decay=own.ema_decay) for key, own in owners.items() if own.ema_decay}
