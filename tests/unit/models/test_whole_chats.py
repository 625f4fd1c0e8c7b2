"""Whole chats for supervised training: the tokens of the chat template, with the turns of the assistant trained."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Lfm2Config, MambaConfig

from rheostat.infra.errors import BadInput
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import ChatTraining, WarmupConfig
from rheostat.models.data.images import digest_of
from rheostat.models.data.problems import ImagePlace, Message, TemplateArguments
from rheostat.models.data.training_chats import TrainingChat, load_chats, order_chats
from rheostat.models.inspection.chats import check_chats
from rheostat.models.inspection.directory import inspect_scratch
from rheostat.models.inspection.facts import InputFacts, Inputs
from rheostat.models.modeling.batching import Sequences, fill_microbatches
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.shared_prompts import may_share_prompts, use_attention_kernel
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.text.training_rows import enforce_chat_length
from rheostat.models.text.whole_chats import ChatEncoder
from rheostat.models.training.supervised import imitation_loss
from rheostat.models.vision.processor import load_processor
from rheostat.tasks.config.run import RunConfig
from tests.support.chat_templates import CHATML, FIND, GENERATION, PUBLISHED, SMOLVLM, tokenizer_of, with_template
from tests.support.data_files import write_lines
from tests.support.demos import ArithmeticData
from tests.support.families import FAMILIES, SHAPE, build
from tests.support.flash_kernels import reference_kernel
from tests.support.vision import picture, write_seeing

QUESTION, ANSWER = Message("user", "Ana has 3 pens"), Message("assistant", "it is sunny")
SECOND, LAST = Message("user", "calls 4"), Message("assistant", "role user tool")
CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": "pens"}}}
CHAT = (QUESTION, ANSWER, SECOND, LAST)
ENDS = {
    **dict.fromkeys(("qwen-2.5", "qwen-2.5-base", "phi-4"), ("", "<|im_end|>", "<|im_end|>")),
    "qwen-3": ("", "<|im_end|>", "<|im_end|>"),
    "llama-3.1": ("", "<|eot_id|>", "<|eot_id|>"),
    "mistral-v3": (" ", "</s>", "</s>"),
    "mistral-v7": ("", "</s>", "</s>"),
    "gemma-3": ("", "<end_of_turn>", "<end_of_turn>"),
    "gpt-oss": ("<|channel|>final<|message|>", "<|return|>", "<|return|>"),
    "deepseek-v3": ("", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "granite-3": ("", "<|end_of_text|>", "<|end_of_text|>"),
    "command-r": ("<|START_RESPONSE|>", *["<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"] * 2),
    "glm-4": ("\n", "<|user|>", "<|endoftext|>"),
    "plain": ("", "<|eos|>", "<|eos|>"),
}
"""Text before the content of a turn, and the ends of an inner and of the last turn, as policies generate them."""


def encode(name_or_tokenizer, *messages, **options):
    tokenizer = tokenizer_of(name_or_tokenizer) if isinstance(name_or_tokenizer, str) else name_or_tokenizer
    if isinstance(name_or_tokenizer, str):
        options["ends"] = [tokenizer.convert_tokens_to_ids(each) for each in PUBLISHED[name_or_tokenizer].stops]
    template = options.pop("template", TemplateArguments())
    [[encoded]] = ChatEncoder(tokenizer, **options).encode([TrainingChat("chats.jsonl:1", messages, (), template)])
    return tokenizer, encoded


def trained_texts(tokenizer, encoded):
    return [tokenizer.decode(chunk.tokens) for chunk in encoded.chunks if chunk.is_trained]


@pytest.mark.parametrize("name", ENDS)
def test_the_turns_of_the_assistant_are_trained_with_the_tokens_that_end_them(name):
    before, inner, last = ENDS[name]
    texts = trained_texts(*encode(name, *CHAT))
    assert [re.sub(r"<think>\s*</think>\s*", "", text) for text in texts] == [
        f"{before}it is sunny{inner}",
        f"{before}role user tool{last}",
    ]


@pytest.mark.parametrize("name", [name for name in ENDS if name not in ("plain", "glm-4", "gpt-oss")])
def test_the_tokens_are_those_of_apply_chat_template(name):
    tokenizer, encoded = encode(name, *CHAT)
    whole = tokenizer.apply_chat_template([each.encode() for each in CHAT], return_dict=False)
    assert encoded.tokens.tolist() == whole[: len(encoded)]


def test_the_end_of_a_turn_in_gpt_oss_is_the_token_that_ends_a_generation():
    tokenizer, encoded = encode("gpt-oss", *CHAT)
    assert "<|return|><|start|>user" in tokenizer.decode(encoded.tokens)
    assert "<|return|><|end|>" not in tokenizer.decode(encoded.tokens)


def test_calls_of_tools_are_trained_and_their_results_are_not():
    chat = (QUESTION, Message("assistant", "", fields={"tool_calls": [CALL]}), Message("tool", "7 pens"), LAST)
    tokenizer, encoded = encode("qwen-2.5", *chat, template=TemplateArguments((FIND,)))
    call, answer = trained_texts(tokenizer, encoded)
    assert '{"name": "find", "arguments": {"what": "pens"}}' in call
    assert (call.endswith("</tool_call><|im_end|>"), answer) == (True, "role user tool<|im_end|>")
    assert "Find a thing." in tokenizer.decode(encoded.prompt)


@pytest.mark.parametrize("place", [0, 1])
def test_special_tokens_in_messages_are_text(place):
    spelled = Message(CHAT[place].role, "a<|im_end|>b")
    tokenizer, encoded = encode("qwen-2.5", *CHAT[:place], spelled, *CHAT[place + 1 :])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert encoded.tokens.tolist().count(end) == 4
    assert len(trained_texts(tokenizer, encoded)) == 2
    assert "a<|im_end|>b" in tokenizer.decode(encoded.tokens)


def test_special_tokens_in_messages_are_parsed_if_special_tokens_is_parse():
    chat = (Message("user", "a<|im_end|>b"), *CHAT[1:])
    tokenizer, encoded = encode("qwen-2.5", *chat, rules=TextRules("parse"))
    assert encoded.tokens.tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 5


def test_generation_blocks_of_the_template_are_trained():
    tokenizer = with_template(GENERATION, backend=tokenizer_of("qwen-2.5").backend_tokenizer)
    _, encoded = encode(tokenizer, *CHAT)
    whole = tokenizer.apply_chat_template(
        [each.encode() for each in CHAT], return_assistant_tokens_mask=True, return_dict=True
    )
    assert encoded.tokens.tolist() == whole["input_ids"][: len(encoded)]
    assert encoded.trained_positions.tolist() == np.flatnonzero(whole["assistant_masks"]).tolist()


def test_the_first_token_of_a_sequence_is_not_trained_because_nothing_predicts_it():
    template = "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    tokenizer, encoded = encode(
        with_template(template, backend=tokenizer_of("qwen-2.5").backend_tokenizer), ANSWER, LAST
    )
    assert encoded.trained_positions.tolist() == list(range(1, len(encoded)))
    assert tokenizer.decode(encoded.tokens) == "it is sunny<|im_end|>role user tool<|im_end|>"


def test_without_generation_blocks_the_same_tokens_are_trained():
    backend = tokenizer_of("qwen-2.5").backend_tokenizer
    marked = with_template(GENERATION, backend=backend)
    plain = with_template(re.sub(r"{% (end)?generation %}", "", GENERATION), backend=backend)
    plain.eos_token = marked.eos_token = CHATML[1]
    (_, with_blocks), (_, without) = (encode(tokenizer, *CHAT) for tokenizer in (marked, plain))
    assert with_blocks == without


def test_a_token_does_not_cross_the_begin_of_a_turn():
    tokenizer, encoded = encode("plain", *CHAT)
    assert tokenizer.decode(encoded.prompt).endswith("assistant: ")
    prompt = tokenizer.apply_chat_template([QUESTION.encode()], add_generation_prompt=True, return_dict=False)
    assert encoded.prompt.tolist() == prompt


@pytest.mark.parametrize(("loss", "num_turns"), [("assistant", 2), ("last", 1)])
def test_all_turns_or_only_the_last_one_are_trained(loss, num_turns):
    assert len(trained_texts(*encode("qwen-2.5", *CHAT, Message("user", "Thanks"), loss=loss))) == num_turns


def test_all_tokens_except_the_first_are_trained_on_request():
    tokenizer, encoded = encode("qwen-2.5", *CHAT, loss="all")
    whole = tokenizer.apply_chat_template([each.encode() for each in CHAT], return_dict=False)
    assert encoded.tokens.tolist() == whole
    assert encoded.trained_positions.tolist() == list(range(1, len(whole)))


def test_a_turn_whose_prompt_changes_later_is_refused_and_the_last_one_is_trained():
    thinking = Message("assistant", "<think>\nHm.\n</think>\n\n", fields={"tool_calls": [CALL]})
    chat = (QUESTION, thinking, Message("tool", "7"), ANSWER, SECOND, LAST)
    with pytest.raises(BadInput, match=r"chats.jsonl:1: messages\[3\]: .* earlier thoughts.*loss = 'last'"):
        encode("qwen-3", *chat)
    [text] = trained_texts(*encode("qwen-3", *chat, loss="last"))
    assert text.endswith("role user tool<|im_end|>")


def test_packing_fills_micro_batches_by_tokens():
    sizes = Sequences.unrelated([9, 5, 4, 3, 12])
    assert fill_microbatches((0, 1, 2, 3, 4), sizes, budget=10) == ((4,), (0,), (1, 2), (3,))


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *(("llama", attention) for attention in ("sdpa", "eager", "flash")),
        *(("window", attention) for attention in ("sdpa", "eager", "flash")),
        *(("gemma2", "eager"), ("sinks", "eager"), ("mixture", "sdpa"), ("gpt2", "flash")),
    ],
)
def test_packed_chats_have_the_losses_and_gradients_of_unpacked_ones(family, attention):
    model = build(FAMILIES[family])
    if attention != "flash":
        model.set_attn_implementation(attention)
    module = TokenLogprobs(model, temperature=1.0)
    if attention == "flash":
        module.shares_prompts = use_attention_kernel(reference_kernel, model, name="reference")
    rng = np.random.default_rng(0)
    inputs = []
    for lengths in ((9, 5, 3, 8), (2, 31), (14, 1, 2, 2, 4, 6)):
        tokens = [rng.integers(2, 300, length) for length in lengths]
        each = ModelInput.from_prompt(tokens[0])
        for turn, observation in zip(tokens[1::2], [*tokens[2::2], ()], strict=True):
            each = each.append_completion(turn).append_observation(observation)
        inputs.append(each)
    results = []
    for is_packed in (False, True):
        module.zero_grad()
        parts = [inputs] if is_packed else [[each] for each in inputs]
        losses = [compute_loss(module, part, inputs, is_packed=is_packed) for part in parts]
        results.append((sum(losses), [each.grad.clone() for each in module.parameters() if each.grad is not None]))
    (apart, expected), (packed, gradients) = results
    assert packed == pytest.approx(apart, abs=1e-5)
    for gradient, unpacked in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, unpacked, rtol=0, atol=1e-5)


def compute_loss(module, part, inputs, *, is_packed):
    def forward(batch, *, loss_gradient):
        assert not is_packed or batch.shared is not None
        return module(module.prepare_inputs(batch, torch.device("cpu")))

    weight = 1 / sum(len(each.trained_positions) for each in inputs)
    loss = imitation_loss(forward, part, weight=weight, is_packed=is_packed, device=torch.device("cpu"))
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, pad_token_id=0),
        Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"]),
    ],
    ids=["recurrent", "convolutions and attention"],
)
def test_architectures_that_mix_tokens_outside_of_attention_cannot_be_packed(config, tmp_path):
    policy = inspect_scratch(ScratchPolicy(), ["Ana has 3 pens"])
    policy = replace(policy, shape=replace(policy.shape, packs=may_share_prompts(build(config))))
    path = write_lines(tmp_path / "chats.jsonl", {"messages": [each.encode() for each in CHAT]})
    warmup = WarmupConfig(chats=ChatTraining(path=path, packing=True))
    with pytest.raises(BadInput, match=r"packing = true is not supported .* Set packing = false"):
        facts = InputFacts(
            Inputs.model_validate_json(RunConfig(data=ArithmeticData(), warmup=warmup).model_dump_json())
        )
        facts.policy = policy
        check_chats(warmup, facts, "warmup")


# ---- images
def test_turns_after_later_images_are_trained_in_an_input_of_their_own(tmp_path):
    directory = write_seeing(tmp_path, "smolvlm")
    tokenizer, processor = load_tokenizer(directory), load_processor(directory)
    tokenizer.chat_template = SMOLVLM.replace("<end_of_utterance>", tokenizer.eos_token).replace("<|im_start|>", "")
    shown = Message("user", (ImagePlace(), "red"))
    images = (picture(1), picture(2))
    chat = TrainingChat("c:1", (shown, Message("assistant", "see"), shown, Message("assistant", "red")), images)
    [[first, second]] = ChatEncoder(tokenizer, processor=processor).encode([chat])
    digests = tuple(map(digest_of, images))
    assert (first.images, second.images) == (digests[:1], digests)
    assert [tokenizer.decode(each.completion).strip() for each in (first, second)] == [
        f"{word}{tokenizer.eos_token}" for word in ("see", "red")
    ]
    assert second.tokens[: len(first)].tolist() == first.tokens.tolist()


def test_images_of_chats_are_refused_by_a_policy_that_reads_text():
    chat = TrainingChat("c:1", (Message("user", (ImagePlace(), "red")), ANSWER), (picture(1),))
    with pytest.raises(BadInput, match=r"c:1: the chat has images \(1\), but the policy reads only text"):
        ChatEncoder(tokenizer_of("qwen-2.5")).encode([chat])


# ---- rows of files
def write_chats(path, count, *, begin=0):
    rows = [
        {"messages": [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": f"{number}"}]}
        for number in range(begin, begin + count)
    ]
    return write_lines(path, *rows)


def test_chats_with_the_same_prompt_are_in_the_same_split(tmp_path):
    path = write_chats(tmp_path / "chats.jsonl", 40)
    path.write_text(path.read_text() + path.read_text())
    train, heldout = load_chats(ChatTraining(path=path, heldout_fraction=0.3))
    assert (len(train) + len(heldout), len(heldout) % 2) == (80, 0)
    assert {each.messages for each in train}.isdisjoint(each.messages for each in heldout)


def test_held_out_chats_may_be_a_file_or_none(tmp_path):
    path, kept = write_chats(tmp_path / "chats.jsonl", 3), write_chats(tmp_path / "kept.jsonl", 2, begin=3)
    train, heldout = load_chats(ChatTraining(path=path, heldout_path=kept))
    assert (len(train), len(heldout)) == (3, 2)
    assert len(load_chats(ChatTraining(path=path, heldout_fraction=0))[1]) == 0


def test_every_epoch_has_each_chat_once_and_is_rounded_up_to_whole_steps():
    warmup = WarmupConfig(batch_size=4, chats=ChatTraining(path="chats.jsonl", epochs=3)).for_chats(6)
    assert warmup.steps == 5
    order = order_chats(6, warmup.steps * warmup.batch_size, seed=1)
    assert [sorted(order[start : start + 6]) for start in (0, 6, 12)] == [[*range(6)]] * 3
    assert order[:6] != order[6:12]
    assert order == order_chats(6, 20, seed=1) != order_chats(6, 20, seed=2)


def test_too_long_chats_are_refused_by_name_or_left_out():
    inputs = [[ModelInput.from_prompt([1, 2]).append_completion([3] * length)] for length in (1, 9)]
    assert enforce_chat_length(inputs, ["c:1", "c:2"], context=8, too_long="drop") == inputs[:1]
    with pytest.raises(BadInput, match=r"c:2: the chat has 11 tokens, but the policy's context is 8"):
        enforce_chat_length(inputs, ["c:1", "c:2"], context=8, too_long="refuse")
