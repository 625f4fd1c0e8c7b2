"""Completions of preference files that are messages with fields: trained as the chat template writes them."""

import pytest

from rheostat.infra.errors import BadInput
from rheostat.models.config.data import FileData
from rheostat.models.config.preferences import FilePreferences
from rheostat.models.data.preferences import load_preferences
from rheostat.models.text.sequences import policy_pairs, reward_pairs
from tests.support.chat_templates import tokenizer_of, with_template
from tests.support.data_files import write_lines

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
QUESTION = {"role": "user", "content": "What is 1 and 1?"}
CHOSEN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
REJECTED = {"role": "assistant", "content": "2"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function | tojson }}]{% endfor %}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def load(tmp_path, chosen, rejected=REJECTED, **columns):
    row = {"prompt": [QUESTION], "chosen": [chosen], "rejected": [rejected], **columns}
    path = write_lines(tmp_path / "pairs.jsonl", row)
    return load_preferences(FilePreferences(path=path, heldout_path=path), FileData(path=path), split="train", seed=0)


@pytest.mark.parametrize("name", ["qwen-2.5", "qwen-3", "llama-3.1", "gpt-oss"])
def test_a_completion_with_calls_has_the_tokens_that_the_template_writes(name, tmp_path):
    tokenizer = tokenizer_of(name)
    [pair] = policy_pairs(load(tmp_path, CHOSEN), tokenizer, context=4096)
    whole = tokenizer.apply_chat_template([QUESTION, CHOSEN], tokenize=False)
    trained = tokenizer.decode([*pair.chosen.prompt, *pair.chosen.completion])
    assert whole.startswith(trained)
    assert len(whole.removeprefix(trained).strip()) == 0
    assert "add" in tokenizer.decode(pair.chosen.completion)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (CHOSEN, '[{"name": "add", "arguments": {"a": 1}}]'),
        (CHOSEN | {"content": None, "thinking": "Hm."}, '(Hm.)[{"name": "add", "arguments": {"a": 1}}]'),
        (REJECTED | {"thinking": "Hm."}, "(Hm.)2"),
        (REJECTED | {"thinking": "<|eos|>"}, "(<|eos|>)2"),
    ],
)
def test_fields_of_a_completion_are_trained_and_end_with_the_end_of_a_turn(message, text, tmp_path):
    tokenizer = with_template(TEMPLATE)
    [pair] = policy_pairs(load(tmp_path, message), tokenizer, context=4096)
    *tokens, end = pair.chosen.completion.tolist()
    assert (tokenizer.decode(tokens), end) == (text, tokenizer.eos_token_id)
    assert tokenizer.eos_token_id not in tokens


def test_a_reward_model_is_trained_on_the_text_that_a_policy_would_generate(tmp_path):
    tokenizer = with_template(TEMPLATE)
    [pair] = reward_pairs(load(tmp_path, CHOSEN), tokenizer, template="{completion}", context=4096)
    assert tokenizer.decode(pair.chosen.prompt) == '[{"name": "add", "arguments": {"a": 1}}]'


def test_a_completion_that_the_template_does_not_write_after_the_prompt_is_refused(tmp_path):
    tokenizer = with_template(TEMPLATE.replace("<assistant>", "<assistant><think>"))
    with pytest.raises(BadInput, match=r"pairs.jsonl:1: .*before the last message"):
        policy_pairs(load(tmp_path, CHOSEN), tokenizer, context=4096)
