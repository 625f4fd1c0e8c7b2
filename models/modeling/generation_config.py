"""Completion of a policy's generation_config.json when a run copies the policy.

Engines, trainers and other programs read the end tokens and the suppressed tokens from this file, so all use the same
tokens.
"""

import json
from pathlib import Path

from transformers import AutoConfig

from rheostat.models.config.texts import RULES_BEFORE, TextRules
from rheostat.models.engines.requests import end_tokens, generation_settings, suppressed_tokens
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.text.turn_end import find_turn_end

_FILE = "generation_config.json"


def complete_generation_config(directory: Path, rules: TextRules) -> None:
    """Add the end token of the chat template and the IDs of tokens that must not be generated to a policy's
    generation_config.json.

    An ID is suppressed if it has no token, which happens if the embeddings have more rows than the tokenizer has
    tokens. The file stays unchanged if it is complete, and for runs that began before version 0.2.0 (as `rules`
    states).
    """
    if rules == RULES_BEFORE:
        return
    tokenizer, settings = load_tokenizer(directory), generation_settings(directory)
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    ends, suppressed = set(end_tokens(tokenizer, settings)), set(suppressed_tokens(settings))
    turn_end = find_turn_end(tokenizer, stated=ends) if rules.ends_as_template else None
    all_ends = ends if turn_end is None else ends | {turn_end.token}
    num_rows = getattr(config.get_text_config(), "vocab_size", 0)
    unused = set(range(num_rows)) - set(tokenizer.get_vocab().values()) - all_ends
    if all_ends == ends and unused <= suppressed:
        return
    document = settings.to_diff_dict()
    document.pop("_from_model_config", None)  # transformers would derive such a file from config.json again
    document["eos_token_id"] = sorted(all_ends)
    if unused:
        document["suppress_tokens"] = sorted(suppressed | unused)
    (directory / _FILE).write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
