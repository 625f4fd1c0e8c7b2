"""Checks of the inference engines and of the environment of a run."""

from rheostat.infra.errors import BadInput
from rheostat.models.config.agents import AgentSettings, LmEvalEnvironment
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.engines import EngineSettings
from rheostat.models.config.episodes import SteppedEnvironment
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.config.users import UserModel
from rheostat.models.inspection.facts import InputFacts


def check_engine(engine: EngineSettings, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the class of an engine is incomplete, or if the engine of the rollout does not support the
    policy."""
    from rheostat.models.engines.protocol import check_implemented

    check_implemented(engine, name=where)
    if where == "rollout.engine":
        engine.check_policy(facts.policy.shape, where)


def check_environment(engine: EngineSettings, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the libraries of an engine are not installed on this machine. On a remote cluster, the workers
    check this instead."""
    if facts.inputs.pools.ray_address is None:
        engine.check_environment(where, gpus=facts.gpus(where))


def estimate_memory(rollout: RolloutConfig, facts: InputFacts, where: str) -> CheckResult:
    """Return the bytes that a rollout worker needs. Raises BadInput if the engine cannot serve the policy."""
    gpus, name = facts.inputs.pools.gpus_per_worker, "rollout.engine"
    sizes = rollout.engine.estimate_memory(facts.policy.shape, longest=facts.longest_tokens, gpus=gpus, name=name)
    return CheckResult(facts=sizes)


def check_turns(environment: SteppedEnvironment, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the policy's turns cannot be parsed, or if an episode of the first problem cannot start."""
    from rheostat.models.environments import runtime

    runtime.check_turns(environment, facts.tokenizer, facts.tools, facts.problems[0])


def check_agent(environment: AgentSettings, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the agent cannot start, or if the policy's tool calls cannot be parsed."""
    from rheostat.models.agents import runtime

    runtime.check_agent(environment, facts.tokenizer, facts.problems)


def check_likelihoods(environment: LmEvalEnvironment, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the items of a task need the log-probs of given answers, but the engine cannot compute them."""
    engine, items = facts.inputs.rollout.engine, [each.columns["task"] for each in facts.heldout]
    if not engine.scores_tokens and any(isinstance(item, dict) and item["needs_logprobs"] for item in items):
        raise BadInput(
            f"{where}.{environment.title} of lm-eval needs the log-probs of given answers, which rollout.engine.kind = "
            f"{engine.label!r} does not compute. Set rollout.engine.kind = 'transformers' or 'vllm', or choose a task "
            "with generated answers."
        )


def check_user(user: UserModel, facts: InputFacts, where: str) -> CheckResult:
    """Check that the simulated user of the dialogues can reply, and return the number of its parameters."""
    from rheostat.models.inspection import users

    environment, gpus = facts.inputs.rollout.environment, facts.inputs.pools.gpus_per_worker
    assert environment is not None and environment.dialogue is not None, "a simulated user is part of a dialogue"
    parameters = users.check_user(environment.dialogue, problems=facts.problems, gpus=gpus)
    return CheckResult(facts={"user_parameters": parameters})
