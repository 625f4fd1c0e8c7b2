"""Supervised training on chats with images, compared with TRL's SFTTrainer and its collator for images and texts."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    Gemma3Processor,
    Idefics3Processor,
    InternVLProcessor,
    LlavaProcessor,
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
)

from rheostat.models.config.texts import TextRules
from rheostat.models.config.training import ChatTraining
from rheostat.models.data.images import digest_of
from rheostat.models.data.training_chats import load_chats
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import load_policy, load_vision
from rheostat.models.records.media import InMemoryImages
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.text.training_rows import encode_rows
from rheostat.models.vision.processor import load_processor
from tests.support.data_files import write_lines
from tests.support.sft import assert_same_training, collect_gradients, train_module, train_with_trl
from tests.support.vision import FAMILIES, picture, write_seeing

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # TRL takes seconds to import, and warns

TEMPLATE = (
    "{% for m in messages %}{{ m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content[0].text }}"
    "<|eos|>{% endgeneration %}{% else %}{% for part in m.content %}"
    "{{ 'IMAGE' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
PLACES = {
    "gemma3": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"},
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<|video_pad|>",
    },
}
"""Tokens that processors of transformers expect as attributes of the tokenizer."""
PROCESSORS = {
    "idefics3": (Idefics3Processor, {"image_seq_len": 9}),
    "smolvlm": (Idefics3Processor, {"image_seq_len": 9}),
    "llava": (
        LlavaProcessor,
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "qwen2_5_vl": (Qwen2_5_VLProcessor, {}),
    "qwen3_vl": (Qwen3VLProcessor, {}),
    "gemma3": (Gemma3Processor, {"image_seq_length": 9}),
    "internvl": (InternVLProcessor, {"image_seq_length": 9}),
}


def message(role, text, *, images=0):
    return {"role": role, "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}


SEEN = [
    ([(24, 24)], [message("user", " How many red?", images=1), message("assistant", "#### 4")]),
    (
        [(48, 24), (24, 48)],
        [
            message("user", " describe", images=2),
            message("assistant", "many red"),
            message("user", "How?"),
            message("assistant", "the picture"),
        ],
    ),
    (
        [(20, 60), (24, 24)],
        [
            message("user", " describe", images=1),
            message("assistant", "red"),
            message("user", " How many", images=1),
            message("assistant", "4"),
        ],
    ),
]
"""Sizes of the images of each chat, and its messages."""


@pytest.fixture
def seen(tmp_path):
    """Return a function that writes chats with images to a file. It returns the file's path, and TRL's rows."""

    def write(*, has_completions):
        lines, rows = [], []
        for number, (sizes, messages) in enumerate(SEEN):
            names = [f"{number}-{index}.png" for index in range(len(sizes))]
            for index, (name, (width, height)) in enumerate(zip(names, sizes, strict=True)):
                (tmp_path / name).write_bytes(picture(10 * number + index, width=width, height=height))
            chat = {"prompt": messages[:-1], "completion": messages[-1:]} if has_completions else {"messages": messages}
            lines.append({**chat, "images": names})
            rows.append({**chat, "images": [Image.open(tmp_path / name) for name in names]})
        return write_lines(tmp_path / "chats.jsonl", *lines), rows

    return write


def load_processors(kind, directory):
    """Return the processor of a family in transformers, with a chat template that marks turns, and ours."""
    family, settings = PROCESSORS[kind]
    ours, tokenizer = load_processor(directory), load_tokenizer(directory)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", ours.shown)
    for name, token in PLACES.get(kind, {}).items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))

    class WithoutVideos(family):
        def check_argument_for_proper_class(self, argument_name, argument):
            """Accept that the processor of videos is missing, which needs torchvision."""

    images = FAMILIES[kind][1]()
    return WithoutVideos(images, tokenizer=tokenizer, chat_template=tokenizer.chat_template, **settings), ours


def train_here(directory, path, theirs, ours, *, loss, banned, is_packed=False):
    """Return our model inputs of each chat of a file, the loss and the gradients."""
    chats, _ = load_chats(ChatTraining(path=path, heldout_fraction=0, images_column="images", loss=loss))
    encoded = encode_rows(chats, theirs.tokenizer, loss=loss, rules=TextRules(), ends=(), processor=ours)
    images = InMemoryImages({digest_of(image): image for chat in chats for image in chat.images})
    module = TokenLogprobs(load_policy(directory), temperature=1.0, vision=load_vision(directory, source=images))
    assert module.head.settings.banned == ours.banned
    module.head.settings = module.head.settings._replace(banned=banned)
    packs = is_packed and module.shares_prompts
    return encoded, *train_module(module, [each for inputs in encoded for each in inputs], is_packed=packs)


@pytest.mark.parametrize("loss", ["assistant", "completion"])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_chats_with_images_are_trained_as_by_trl(kind, loss, seen, tmp_path):
    path, rows = seen(has_completions=loss == "completion")
    directory = write_seeing(tmp_path / "policy", kind)
    theirs, ours = load_processors(kind, directory)
    settings = {"assistant_only_loss": True} if loss == "assistant" else {"completion_only_loss": True}
    examples, *expected = train_with_trl(load_policy(directory), theirs, rows, tmp_path / "out", **settings)
    for is_packed in (False, True):
        encoded, *found = train_here(directory, path, theirs, ours, loss=loss, banned=(), is_packed=is_packed)
        for inputs, example in zip(encoded, examples, strict=True):
            assert inputs[-1].tokens.tolist() == example["input_ids"][: len(inputs[-1])]
            trained = [position for each in inputs for position in each.trained_positions.tolist()]
            assert trained == np.flatnonzero(np.array(example["labels"]) != -100).tolist()
        assert_same_training(expected, found)


def test_tokens_that_a_policy_never_generates_have_no_share_of_the_loss(seen, tmp_path):
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    path, rows = seen(has_completions=False)
    directory = write_seeing(tmp_path / "policy", "idefics3")
    theirs, ours = load_processors("idefics3", directory)
    batch = DataCollatorForVisionLanguageModeling(theirs, assistant_only_loss=True)(rows)
    labels, model = batch.pop("labels"), load_policy(directory)
    logits = model(**batch).logits.index_fill(-1, torch.tensor(ours.banned), -torch.inf)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    _, *found = train_here(directory, path, theirs, ours, loss="assistant", banned=ours.banned)
    assert_same_training((float(loss.detach()), collect_gradients(model)), found)
