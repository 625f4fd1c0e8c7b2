"""Check of the step labels on which a run trains a process reward model."""

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.process_models import ProcessModelReward
from rheostat.models.data.step_labels import load_step_labels
from rheostat.models.inspection.facts import InputFacts
from rheostat.models.text.step_inputs import encode_solutions


def check_step_labels(reward: ProcessModelReward, facts: InputFacts, where: str) -> CheckResult | None:
    """Check the labeled solutions on which the run trains the model of a reward. Return the size of the model, which is
    that of the policy, and the numbers of solutions. Return None if the run does not train the model. Raises BadInput,
    which names the reward, if a solution is invalid or uses a held-out problem, or if no token classifier with a linear
    layer `score` can be built from the policy."""
    labels = reward.model.step_labels
    if labels is None:
        return None
    shape, term, input_errors = facts.policy.shape, reward.term, InputErrors()
    try:
        facts.policy.require_process_model()
        splits = [load_step_labels(labels, split)[0] for split in ("train", "heldout")]
        heldout_prompts = {(each.identity_version, each.identity) for each in facts.heldout}
        for each in splits[0]:
            with input_errors.collect(each.source):
                if any((rule, each.identity(rule)) in heldout_prompts for rule in (1, 2)):
                    raise BadInput(
                        f"{each.source}: the prompt of this training row is also a held-out problem, on which the "
                        "policy is evaluated. Remove the row, or remove the problem from the held-out data."
                    )
        input_errors.check()
        train, heldout = (
            encode_solutions(
                each,
                facts.tokenizer,
                separator=reward.separator,
                context=shape.context,
                drop_long="too_long" in labels.drop,
            )
            for each in splits
        )
    except BadInput as error:
        raise BadInput(f"reward {term}: {error}") from error
    sizes = {"parameters": shape.parameters, "solutions": len(train), "heldout_solutions": len(heldout)}
    return CheckResult(facts={f"{term}_{name}": number for name, number in sizes.items()})
