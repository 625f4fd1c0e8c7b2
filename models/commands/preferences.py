"""Check of the preference pairs of a run with the models that are trained on the pairs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput, InputErrors
from models.config.policy import ModelShape
from models.data.preferences import load_preferences
from models.data.problems import Problem
from models.inspection.texts import list_preference_notes
from models.text.sequences import policy_pairs, reward_pairs

if TYPE_CHECKING:
    from models.commands.preflight import Inputs


def check_preferences(
    inputs: "Inputs",
    tokenizer: PreTrainedTokenizerFast,
    heldout: Sequence[Problem],
    notes: list[str],
    *,
    shape: ModelShape,
) -> dict[str, float]:
    """Check all pairs with the models to be trained on them. Return the sizes of the models and the numbers of pairs,
    and append `notes`.

    Reward models are as large as the policy. Raises BadInput if a pair is invalid or uses a held-out problem.
    """
    preferences, data = inputs.preferences, inputs.data
    if preferences is None:
        return {}
    train, heldout_pairs = (
        load_preferences(preferences, data, split=split, seed=inputs.seed) for split in ("train", "heldout")
    )
    heldout_prompts, input_errors = {(each.identity_version, each.identity) for each in heldout}, InputErrors()
    for pair in train:
        with input_errors.collect(pair.source):
            if any((rule, pair.identity(rule)) in heldout_prompts for rule in (1, 2)):
                raise BadInput(
                    f"{pair.source}: the prompt of this training pair is also a held-out problem, on which the policy "
                    "is evaluated. Remove the pair, or remove the problem from the held-out data."
                )
    input_errors.check()
    if inputs.dpo is not None:
        policy_pairs([*train, *heldout_pairs], tokenizer, context=shape.context, rules=data.text_rules)
    trained = inputs.scoring.trained_reward_models
    for reward in trained.values():
        template, form = reward.template, reward.chat_prompt
        reward_pairs([*train, *heldout_pairs], tokenizer, template=template, context=shape.context, chat_prompt=form)
    sizes = {f"{term}_parameters": shape.parameters for term in trained}
    notes += list_preference_notes([*train, *heldout_pairs], tokenizer, rules=data.text_rules)
    return {**sizes, "train_pairs": len(train), "heldout_pairs": len(heldout_pairs)}
