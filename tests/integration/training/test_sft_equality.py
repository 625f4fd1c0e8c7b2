"""Supervised training on chats, compared with TRL's SFTTrainer: the same assistant masks, losses and gradients."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import ChatTraining
from rheostat.models.data.examples import Example
from rheostat.models.data.problems import Message, TemplateArguments
from rheostat.models.data.training_chats import TrainingChat, load_chats
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.text.sequences import example_inputs
from rheostat.models.text.training_rows import encode_rows
from rheostat.models.text.whole_chats import ChatEncoder
from tests.support.chat_templates import FIND, tokenizer_of
from tests.support.data_files import write_lines
from tests.support.sft import assert_same_training, train_module, train_with_trl

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # TRL takes seconds to import, and warns

CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "pens"}}}
PLAIN = [{"prompt": f"Ana has {n} pens and", "completion": f" calls {n}: it is sunny"} for n in (2, 31, 7)]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"Ana has {n} pens"}],
        "completion": [{"role": "assistant", "content": f"it is sunny {n * n}"}],
    }
    for n in (2, 31, 7)
]
DIALOGS = [
    {
        "prompt": [
            {"role": "user", "content": f"find {n}"},
            {"role": "assistant", "content": f"it is sunny {n}"},
            {"role": "user", "content": "calls"},
        ],
        "completion": [
            {"role": "assistant", "content": f"Ana has {n} pens"},
            {"role": "user", "content": f"role {n}"},
            {"role": "assistant", "content": f"it is {n * n}"},
        ],
    }
    for n in (2, 31, 7)
]
TURNS = [
    {
        "messages": [
            {"role": "system", "content": "role"},
            *(
                {"role": role, "content": f"{role} calls {n + turn}"}
                for turn in range(1 + n % 3)
                for role in ("user", "assistant")
            ),
        ]
    }
    for n in (2, 31, 7)
]
TOOLS = [
    {
        "messages": [
            {"role": "user", "content": f"find {n}"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "find", "content": f"{n} pens"},
            {"role": "assistant", "content": f"Ana has {n} pens"},
        ],
        "tools": json.dumps([FIND]),
    }
    for n in (2, 31)
]


def build_model(attention="sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def train_here(inputs, *, is_packed):
    """Return our loss of one batch, and the gradients."""
    return train_module(TokenLogprobs(build_model(), temperature=1.0), inputs, is_packed=is_packed)


def read_chat(row, tokenizer):
    def read(message):
        fields = {"tool_calls": message["tool_calls"]} if message.get("tool_calls") else {}
        return Message(message["role"], message["content"], message.get("name", ""), fields)

    messages = row["messages"] if "messages" in row else [*row["prompt"], *row["completion"]]
    tools = tuple(json.loads(row["tools"])) if "tools" in row else ()
    return TrainingChat("row", tuple(map(read, messages)), (), TemplateArguments(tools))


def use_markers(tokenizer):
    """Return the tokenizer with TRL's template for training, which marks the turns of the assistant."""
    from trl.chat_template_utils import get_training_chat_template, qwen2_5_chat_template

    tokenizer.chat_template = qwen2_5_chat_template
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    return tokenizer


@pytest.fixture
def tokenizer():
    from copy import deepcopy

    return deepcopy(tokenizer_of("qwen-2.5"))


def test_plain_prompts_and_completions_are_trained_as_by_trl(tokenizer, tmp_path):
    examples, *theirs = train_with_trl(build_model(), tokenizer, PLAIN, tmp_path)
    inputs = example_inputs([Example(row["prompt"], row["completion"]) for row in PLAIN], tokenizer, source="row")
    for each, example in zip(inputs, examples, strict=True):
        assert each.tokens.tolist() == example["input_ids"]
        assert each.trained_positions.tolist() == np.flatnonzero(np.array(example["labels"]) != -100).tolist()
    assert_same_training(theirs, train_here(inputs, is_packed=False))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("rows", [TURNS, TOOLS], ids=["turns", "tools"])
def test_turns_of_the_assistant_are_trained_as_by_trl(rows, is_packed, tokenizer, tmp_path):
    tokenizer = use_markers(tokenizer)
    examples, *theirs = train_with_trl(build_model(), tokenizer, rows, tmp_path, assistant_only_loss=True)
    inputs = [each for [each] in ChatEncoder(tokenizer).encode([read_chat(row, tokenizer) for row in rows])]
    for each, example in zip(inputs, examples, strict=True):
        assert each.tokens.tolist() == example["input_ids"][: len(each)]
        assert each.trained_positions.tolist() == np.flatnonzero(np.array(example["labels"]) != -100).tolist()
    assert_same_training(theirs, train_here(inputs, is_packed=is_packed))


def test_the_last_turn_is_trained_as_the_completion_of_a_prompt_in_trl(tokenizer, tmp_path):
    tokenizer.chat_template = tokenizer.chat_template.replace("{% endfor %}<|im_end|>\n", "{% endfor %}<|im_end|>")
    examples, *theirs = train_with_trl(build_model(), tokenizer, PAIRS, tmp_path)
    inputs = [
        each for [each] in ChatEncoder(tokenizer, loss="last").encode([read_chat(row, tokenizer) for row in PAIRS])
    ]
    for each, example in zip(inputs, examples, strict=True):
        assert each.tokens.tolist() == example["input_ids"]
        assert each.trained_positions.tolist() == np.flatnonzero(np.array(example["labels"]) != -100).tolist()
    assert_same_training(theirs, train_here(inputs, is_packed=False))


def encode_file(rows, path, tokenizer, **settings):
    config = ChatTraining(path=write_lines(path, *rows), heldout_fraction=0, **settings)
    read = load_chats(config)[0]
    encoded = encode_rows(read, tokenizer, loss=config.loss, rules=TextRules(), ends=(), processor=None)
    return [each for [each] in encoded]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    ("rows", "loss"),
    [(PLAIN, "assistant"), (PAIRS, "completion"), (DIALOGS, "completion")],
    ids=["texts", "pairs", "dialogs"],
)
def test_completions_are_trained_as_by_trl_with_completion_only_loss(rows, loss, is_packed, tokenizer, tmp_path):
    examples, *theirs = train_with_trl(build_model(), tokenizer, rows, tmp_path, completion_only_loss=True)
    inputs = encode_file(rows, tmp_path / "chats.jsonl", tokenizer, loss=loss)
    for each, example in zip(inputs, examples, strict=True):
        assert each.tokens.tolist() == example["input_ids"]
        assert each.trained_positions.tolist() == np.flatnonzero(np.array(example["labels"]) != -100).tolist()
    assert_same_training(theirs, train_here(inputs, is_packed=is_packed))


@pytest.mark.parametrize("is_packed", [False, True])
def test_plain_texts_are_trained_as_a_whole_as_by_trl(is_packed, tokenizer, tmp_path):
    rows = [{"text": row["prompt"] + row["completion"]} for row in PLAIN]
    examples, *theirs = train_with_trl(build_model(), tokenizer, rows, tmp_path)
    inputs = encode_file(rows, tmp_path / "chats.jsonl", tokenizer)
    assert [each.tokens.tolist() for each in inputs] == [example["input_ids"] for example in examples]
    assert_same_training(theirs, train_here(inputs, is_packed=is_packed))


def test_turns_in_completions_are_trained_as_by_trl_with_assistant_only_loss(tokenizer, tmp_path):
    tokenizer = use_markers(tokenizer)
    settings = {"completion_only_loss": True, "assistant_only_loss": True}
    examples, *theirs = train_with_trl(build_model(), tokenizer, DIALOGS, tmp_path, **settings)
    inputs = encode_file(DIALOGS, tmp_path / "chats.jsonl", tokenizer)
    for each, example in zip(inputs, examples, strict=True):
        assert each.trained_positions.tolist() == np.flatnonzero(np.array(example["labels"]) != -100).tolist()
    assert_same_training(theirs, train_here(inputs, is_packed=False))


def test_all_tokens_are_trained_as_by_trl(tokenizer, tmp_path):
    _, *theirs = train_with_trl(build_model(), tokenizer, TURNS, tmp_path)
    inputs = [
        each for [each] in ChatEncoder(tokenizer, loss="all").encode([read_chat(row, tokenizer) for row in TURNS])
    ]
    assert_same_training(theirs, train_here(inputs, is_packed=True))


def test_packed_chats_are_trained_as_by_trl(tokenizer, tmp_path):
    tokenizer = use_markers(tokenizer)
    examples, *theirs = train_with_trl(
        build_model(), tokenizer, TURNS, tmp_path, assistant_only_loss=True, packing=True
    )
    assert len(examples) == 1
    inputs = [each for [each] in ChatEncoder(tokenizer).encode([read_chat(row, tokenizer) for row in TURNS])]
    assert_same_training(theirs, train_here(inputs, is_packed=True))
