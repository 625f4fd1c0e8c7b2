"""What an algorithm asks of models before credit, beside rewards."""

from dataclasses import astuple, dataclass

from models.algorithms.config import Algorithm, GroupRelative, Ppo, ReinforcePlusPlus, RewardKl


@dataclass(frozen=True, slots=True)
class Needs:
    """Whose opinion of every token credit needs."""

    reference: bool
    """The initial policy's, for a penalty in the reward."""
    critic: bool
    teacher: bool
    """The teacher's, and beside it the policy's own by the trainer."""

    @property
    def any(self) -> bool:
        """Whether there is anything to ask."""
        return any(astuple(self))


def needs_of(algorithm: Algorithm) -> Needs:
    """Whose opinion of every token the algorithm needs."""
    return Needs(
        reference=reward_kl(algorithm) is not None,
        critic=isinstance(algorithm, Ppo),
        teacher=algorithm.distillation is not None,
    )


def reward_kl(algorithm: Algorithm) -> RewardKl | None:
    """The penalty in the reward, of algorithms that have one."""
    return algorithm.kl if isinstance(algorithm, GroupRelative | ReinforcePlusPlus | Ppo) else None
