"""Rules for all models of a job that are computed from earlier policies. Torch-free."""

from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.divergence import ReferenceReset
from rheostat.models.config.objectives import UpdateConfig


def find_reference_rules(update: UpdateConfig, algorithm: Algorithm) -> dict[str, ReferenceReset]:
    """Return the rules for the reference of each KL penalty and for each teacher that is a moving average of the
    policies, by configuration key. A run has one such model, so it can follow only one of them."""
    penalties = {"update.kl": update.kl_penalty, "algorithm.kl": algorithm.reward_kl}
    rules = {key: penalty.rule for key, penalty in penalties.items() if penalty is not None}
    teachers = {} if algorithm.distillation is None else algorithm.distillation.teachers
    decays = {key: each.privileged.ema_decay for key, each in teachers.items() if each.privileged is not None}
    return rules | {key: ReferenceReset(ema_decay=decay) for key, decay in decays.items() if decay is not None}
