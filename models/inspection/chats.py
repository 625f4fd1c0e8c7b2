"""Check of the chats on which the warm-up trains a policy."""

from collections.abc import Sequence

from rheostat.infra.errors import BadInput, InputErrors
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.training import WarmupConfig
from rheostat.models.data.problems import Problem
from rheostat.models.data.training_chats import TrainingRow, load_chats, report_chats
from rheostat.models.inspection.facts import InputFacts
from rheostat.models.inspection.texts import list_chat_notes
from rheostat.models.text.training_rows import encode_rows, enforce_chat_length


def check_chats(warmup: WarmupConfig, facts: InputFacts, where: str) -> CheckResult:
    """Encode all chats on which the warm-up trains the policy. Return their numbers, and remarks for the user. Raises
    BadInput if a chat is invalid or too long, if a training chat uses a held-out problem, or if the policy's
    architecture does not support packing."""
    if warmup.chats is None:
        return CheckResult()
    policy, data = facts.policy, facts.inputs.data
    config, rules = warmup.chats, data.text_rules
    if config.packing and not policy.shape.packs:
        raise BadInput(
            f"warmup.chats.packing = true is not supported by {policy.outline.kind}, because its layers combine tokens "
            "outside of attention, where chats could affect each other. Set packing = false."
        )
    train, heldout_chats = load_chats(config, background=data.image_background)
    _require_unseen(train, facts.heldout)
    kept = [
        enforce_chat_length(
            encode_rows(
                chats, policy.tokenizer, loss=config.loss, rules=rules, ends=policy.ends, processor=facts.processor
            ),
            [chat.source for chat in chats],
            context=policy.shape.context,
            too_long=config.on_too_long,
        )
        for chats in (train, heldout_chats)
    ]
    inputs = [each for chat in kept[0] for each in chat]
    numbers: dict[str, float] = {
        "chats": len(kept[0]),
        "heldout_chats": len(kept[1]),
        "too_long_chats": len(train) + len(heldout_chats) - sum(map(len, kept)),
        "chat_tokens": sum(map(len, inputs)),
        "trained_chat_tokens": sum(len(each.trained_positions) for each in inputs),
        "longest_chat_tokens": max(map(len, inputs)),
        "chat_steps": warmup.for_chats(len(kept[0])).steps,
    }
    notes = (*report_chats(config), *list_chat_notes([*train, *heldout_chats], policy.tokenizer, rules=rules))
    return CheckResult(facts=numbers, notes=notes)


def _require_unseen(train: Sequence[TrainingRow], heldout: Sequence[Problem]) -> None:
    """Raise BadInput if a training chat begins with the prompt of a held-out problem."""
    prompts, input_errors = {(each.identity_version, each.identity) for each in heldout}, InputErrors()
    for chat in train:
        with input_errors.collect(chat.source):
            if any((version, chat.identity(version)) in prompts for version in (1, 2)):
                raise BadInput(f"{chat.source}: this training chat uses a held-out problem. Remove one of the two.")
    input_errors.check()
