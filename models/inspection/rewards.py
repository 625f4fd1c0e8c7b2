"""Checks of a run's rewards: their functions, sandboxes, judges and reward models."""

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.judges import JudgeReward, ServedReward
from rheostat.models.config.reward_terms import CodeReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.inspection.facts import InputFacts
from rheostat.models.inspection.images import check_judge_images, check_reward_images
from rheostat.models.judges.checks import check_judge
from rheostat.models.rewards.code import check_code, read_tests
from rheostat.models.rewards.evaluate import check_rewards, reference_checks


def check_functions(scoring: ScoringConfig, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a reward function cannot be built or imported."""
    check_rewards(scoring)


def check_problems(scoring: ScoringConfig, facts: InputFacts, where: str) -> None:
    """Raise BadInput, with all faults of the reference answers, if a reward cannot use the answers or the images of the
    problems."""
    input_errors = InputErrors()
    with reference_checks(scoring) as checks:
        checks += [(reward.label, read_tests) for reward in scoring.code_rewards.values()]
        for problem in facts.problems:
            with input_errors.collect(problem.source):
                for name, check_reference in checks:
                    try:
                        check_reference(problem.answer)
                    except ValueError as error:
                        raise BadInput(
                            f"{problem.source}: reward {name!r} cannot use the reference answer: {error}"
                        ) from error
    input_errors.check()
    check_reward_images(scoring, facts.problems, generates_images=facts.inputs.policy.generates_images)


def check_sandbox(reward: CodeReward, facts: InputFacts, where: str) -> None:
    """Raise BadInput if no sandbox is available for the programs of a code reward."""
    check_code(ScoringConfig(rewards=(reward,)))


def check_judge_settings(reward: JudgeReward, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the settings of a judge are invalid."""
    check_judge(reward.term, reward, facts.inputs.data)


def check_judge_policy(reward: JudgeReward, facts: InputFacts, where: str) -> CheckResult | None:
    """Check that the policy can serve as a judge, if the judge starts as a copy of the policy. Return the judge's
    size."""
    from rheostat.models.inspection.other_models import check_policy_judge

    if not reward.model.begins_as_policy:
        return None
    gpus = reward.slots * facts.inputs.pools.gpus_per_worker
    parameters = check_policy_judge(reward.term, reward, facts.policy, problems=facts.train, gpus=gpus)
    return CheckResult(facts={f"{reward.term}_parameters": parameters})


def check_judge_endpoint(reward: JudgeReward, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a judge behind an endpoint ignores the images of prompts."""
    check_judge_images(ScoringConfig(rewards=(reward,)))


def check_model(reward: ServedReward, facts: InputFacts, where: str) -> CheckResult | None:
    """Check the judge or the reward model that computes a reward in worker slots, unless it starts as a copy of the
    policy. Return its size."""
    from rheostat.models.inspection.other_models import check_served_model

    if reward.endpoint is not None or reward.model.begins_as_policy:
        return None
    gpus = reward.slots * facts.inputs.pools.gpus_per_worker
    parameters = check_served_model(reward.term, reward, problems=facts.train, seed=facts.inputs.seed, gpus=gpus)
    return CheckResult(facts={f"{reward.term}_parameters": parameters})
