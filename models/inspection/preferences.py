"""Check of the preference pairs of a run with the models that are trained on the pairs."""

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.preferences import Preferences
from rheostat.models.data.preferences import load_preferences
from rheostat.models.data.reading import report_reading
from rheostat.models.inspection.facts import InputFacts
from rheostat.models.inspection.texts import list_preference_notes
from rheostat.models.text.sequences import policy_pairs, reward_pairs


def check_preferences(preferences: Preferences, facts: InputFacts, where: str) -> CheckResult:
    """Check all preference pairs of a run with the models that are trained on them. Return the sizes of the models, the
    numbers of pairs, and remarks for the user. Reward models are as large as the policy. Raises BadInput if a pair is
    invalid or uses a held-out problem."""
    inputs, shape, tokenizer, data = facts.inputs, facts.policy.shape, facts.tokenizer, facts.inputs.data
    train, heldout_pairs = (
        load_preferences(preferences, data, split=split, seed=inputs.seed) for split in ("train", "heldout")
    )
    heldout_prompts, input_errors = {(each.identity_version, each.identity) for each in facts.heldout}, InputErrors()
    for pair in train:
        with input_errors.collect(pair.source):
            if any((rule, pair.identity(rule)) in heldout_prompts for rule in (1, 2)):
                raise BadInput(
                    f"{pair.source}: the prompt of this training pair is also a held-out problem, on which the policy "
                    "is evaluated. Remove the pair, or remove the problem from the held-out data."
                )
    input_errors.check()
    reading, drop_long, fitting = report_reading(preferences, "train", "heldout"), preferences.drops_long_pairs, []
    if inputs.dpo is not None:
        fitting += [
            policy_pairs(pairs, tokenizer, context=shape.context, rules=data.text_rules, drop_long=drop_long)
            for pairs in (train, heldout_pairs)
        ]
    trained = inputs.scoring.trained_reward_models
    for reward in trained.values():
        template, form = reward.template, reward.chat_prompt
        fitting += [
            reward_pairs(
                pairs, tokenizer, template=template, context=shape.context, chat_prompt=form, drop_long=drop_long
            )
            for pairs in (train, heldout_pairs)
        ]
    sizes = {f"{term}_parameters": shape.parameters for term in trained}
    notes = (*reading.notes, *list_preference_notes([*train, *heldout_pairs], tokenizer, rules=data.text_rules))
    num_train = min(map(len, fitting[::2]), default=len(train))
    num_heldout = min(map(len, fitting[1::2]), default=len(heldout_pairs))
    dropped = {f"dropped_pairs/{reason}": number for reason, number in reading.dropped.items()}
    if drop_long:
        dropped["dropped_pairs/too_long"] = len(train) + len(heldout_pairs) - num_train - num_heldout
    numbers = {**sizes, **dropped, "train_pairs": num_train, "heldout_pairs": num_heldout}
    return CheckResult(facts=numbers, notes=notes)
