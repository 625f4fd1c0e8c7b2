"""Discriminative reward models: small random classifiers, compared with scores that transformers computes."""

import json
import math
import pickle
import shutil

import pyarrow as pa
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rheostat.infra.errors import BadInput, Damaged
from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.judges import DirectoryRewardModel, ModelReward
from rheostat.models.data.problems import Message, TemplateArguments, encode_template_input
from rheostat.models.modeling.reward_model import check_reward_model, load_reward_model, score
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import PROMPT_SCHEMA, TEMPLATE, VERDICT_SCHEMA
from rheostat.models.records.versions import ModelVersion
from rheostat.models.records.work import JudgeWork
from rheostat.models.workers.reward_model import RewardModelWorker
from tests.support.policies import CLASSIFIERS, small_tokenizer
from tests.support.rollout_shards import rollout, write_rollouts

TEXTS = [f"Ana has {n} pens, buys {n * 7} and sells {n // 2}. " * (1 + n % 2) + "#" * (n % 5) for n in range(1, 24)]
REWARD = ModelReward(
    model=DirectoryRewardModel(path="unused"), name="liked", template="{prompt}{completion}", batch_tokens=200
)


def write_classifier(
    directory, architecture="llama", *, labels=1, padding_side="right", pad=True, keeps_chat_template=False
):
    tokenizer = small_tokenizer()
    config, shape = CLASSIFIERS[architecture]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForSequenceClassification.from_config(
            config(
                **shape,
                vocab_size=len(tokenizer),
                num_labels=labels,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id if pad else None,
                bos_token_id=None,
            )
        )
        head = model.classifier if architecture == "bert" else model.score
        torch.nn.init.normal_(head.weight)  # scores of the order of 1
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    stated = json.loads(path.read_text()) | {"padding_side": padding_side, "model_max_length": 64}
    if not keeps_chat_template:
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        stated.pop("chat_template", None)
    path.write_text(json.dumps(stated))
    return directory


def plain_scores(directory, texts):
    """Return the scores of transformers for one text at a time, without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]


class Scorer:
    """A run's store and a worker with a reward model."""

    def __init__(self, root, directory, *, reward=REWARD):
        self.store = open_store(str(root / "run"))
        self.model = self.publish(directory)
        self.worker = RewardModelWorker(str(root), "run", "liked", reward, 1)

    def publish(self, directory):
        return ModelVersion(0, publish_bundle(self.store, directory, prefix="policies"))

    def judge(self, pairs, prompts=None):
        rows = [rollout(row // 2, row % 2, text, prompt=prompt) for row, (prompt, text) in enumerate(pairs)]
        rollouts = write_rollouts(self.store, *rows)
        return self.worker.judge(JudgeWork(1, rollouts, model=self.model, seed=0, prompts=prompts))

    def verdicts(self, pairs):
        [ref] = self.judge(pairs).shards
        return read_shard(self.store, ref)


def edit_json(path, **keys):
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {}),
        ("llama", {"padding_side": "left"}),
        ("llama", {"pad": False}),
        ("qwen3", {}),
        ("gpt2", {}),
        ("bert", {}),
    ],
)
def test_batched_scores_equal_those_of_transformers_for_one_text_at_a_time(tmp_path, architecture, settings):
    directory = write_classifier(tmp_path / "model", architecture, **settings)
    verdicts = Scorer(tmp_path, directory).verdicts([("", text) for text in TEXTS])
    expected = plain_scores(directory, TEXTS)
    assert max(expected) - min(expected) > 0.1
    assert verdicts["value"].to_pylist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("batch_tokens", "min_passes", "max_passes"), [(1, 23, 23), (100, 4, 22), (10_000, 1, 3)])
def test_a_score_does_not_depend_on_the_batch(classifier, batch_tokens, min_passes, max_passes):
    reward = load_reward_model(classifier)
    inputs = [ModelInput.from_prompt(reward.tokenizer(text)["input_ids"]) for text in TEXTS]
    passes = []
    scores = score(reward, inputs, batch_tokens=batch_tokens, on_pass=lambda rows, seconds: passes.append(rows))
    assert [scored.value for scored in scores] == pytest.approx(plain_scores(classifier, TEXTS), abs=1e-4)
    assert min_passes <= len(passes) <= max_passes
    assert sum(passes) == len(TEXTS)


def test_verdicts_have_a_row_for_each_completion_in_order_and_repeat_after_sleep(tmp_path, classifier):
    scorer = Scorer(tmp_path, classifier)
    outcome = scorer.judge([("2+2=", "4"), ("2+2=", "5"), ("3+3=", "6")])
    [ref] = outcome.shards
    verdicts = read_shard(scorer.store, ref)
    assert verdicts.schema.remove_metadata() == VERDICT_SCHEMA
    rows = verdicts.select(["prompt_row", "sample", "vote", "attempt", "text", "error", "tokens"]).to_pylist()
    usual = {"vote": 0, "attempt": 0, "text": None, "error": None, "tokens": 0}
    assert rows == [{"prompt_row": row, "sample": sample, **usual} for row, sample in ((0, 0), (0, 1), (1, 0))]
    assert outcome.metrics == {"sequences": 3, "tokens": 3, "tokens_read": 15, "answers": 3, "invalid": 0}
    assert outcome.detail == {"lengths": [1, 1, 1]}
    assert outcome.timings["step_sequences"] == 3
    assert outcome.timings["steps"] >= 1
    scorer.worker.sleep()
    assert scorer.judge([("2+2=", "4"), ("2+2=", "5"), ("3+3=", "6")]).shards == (ref,)


@pytest.mark.parametrize(("text", "reason"), [("1" * 400, "1 to 64"), ("4<|eos|>5", "<|eos|>")])
def test_a_text_beyond_the_context_or_with_a_special_token_is_invalid(tmp_path, classifier, text, reason):
    verdicts = Scorer(tmp_path, classifier).verdicts([("", text), ("", "fine")])
    assert verdicts["value"][0].as_py() is None
    assert reason in verdicts["error"][0].as_py()
    assert verdicts["value"][1].as_py() == pytest.approx(plain_scores(classifier, ["fine"])[0], abs=1e-5)


def test_a_score_that_is_not_finite_is_invalid(tmp_path):
    directory = write_classifier(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        model.score.weight.fill_(math.nan)
    model.save_pretrained(directory)
    scorer = Scorer(tmp_path, directory)
    outcome = scorer.judge([("", "4")])
    [row] = read_shard(scorer.store, outcome.shards[0]).to_pylist()
    assert (row["value"], row["error"], outcome.metrics["invalid"]) == (None, "the model's score is nan", 1)


def test_a_reward_model_with_a_chat_template_receives_the_messages_of_the_prompt(tmp_path):
    directory = write_classifier(tmp_path / "model", keeps_chat_template=True)
    reward = ModelReward(model=DirectoryRewardModel(path="unused"), name="liked")
    scorer = Scorer(tmp_path, directory, reward=reward)
    asked = {"system": "Be kind.", "user": "Hi"}
    messages = [{"role": role, "content": content, "name": None} for role, content in asked.items()]
    row = {"prompt_id": "a", "text": "", "tokens": [1], "images": [], "answer": "", "columns": "{}"}
    table = pa.Table.from_pylist([{**row, "messages": messages}, {**row, "messages": None}], PROMPT_SCHEMA)
    prompts = write_shard(scorer.store, table, kind="prompts", metadata={})
    pairs = [("rendered", "yes"), ("rendered", "no"), ("Hi", "yes")]
    [ref] = scorer.judge(pairs, prompts).shards
    texts = ["system: Be kind.\nuser: Hi\nassistant: yes\n", "system: Be kind.\nuser: Hi\nassistant: no\n"]
    expected = plain_scores(directory, [*texts, "user: Hi\nassistant: yes\n"])
    assert read_shard(scorer.store, ref)["value"].to_pylist() == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_receives_the_tools_and_variables_of_the_prompt_and_the_fields_of_messages(tmp_path):
    directory = write_classifier(tmp_path / "model", keeps_chat_template=True)
    template = (
        "{{ tools[0].name }}{{ mood }}{% for m in messages %}{{ m.role }}{{ m.thinking }}{{ m.content }}{% endfor %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    reward = ModelReward(model=DirectoryRewardModel(path="unused"), name="liked")
    scorer = Scorer(tmp_path, directory, reward=reward)
    chat = (Message("user", "Hi"), Message("assistant", "a", fields={"thinking": "b"}), Message("user", "c"))
    arguments = TemplateArguments(({"name": "add"},), {"mood": "glad"})
    messages = [{"role": each.role, "content": each.content, "name": None} for each in chat]
    row = {"prompt_id": "a", "text": "", "tokens": [1], "images": [], "answer": "", "columns": "{}"}
    schema = PROMPT_SCHEMA.append(pa.field(TEMPLATE, pa.string()))
    encoded = encode_template_input(chat, arguments)
    table = pa.Table.from_pylist([{**row, "messages": messages, TEMPLATE: encoded}], schema)
    [ref] = scorer.judge([("rendered", "yes")], write_shard(scorer.store, table, kind="prompts", metadata={})).shards
    expected = plain_scores(directory, ["addgladuserHiassistantbauserc" + "assistantyes"])
    assert read_shard(scorer.store, ref)["value"].to_pylist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("template", "is_chat", "pair", "text"),
    [
        (
            "Q {prompt} A {completion} {x}",
            False,
            ("{completion}", "{prompt} {0}"),
            "Q {completion} A {prompt} {0} {x}",
        ),
        (None, False, ("2+2=", "4"), "2+2=4"),
        (None, True, ("2+2=", "4"), "user: 2+2=\nassistant: 4\n"),
    ],
)
def test_the_scored_text_is_the_filled_template_or_the_chat_or_the_plain_texts(tmp_path, template, is_chat, pair, text):
    directory = write_classifier(tmp_path / "model", keeps_chat_template=is_chat)
    reward = REWARD.model_copy(update={"template": template})
    verdicts = Scorer(tmp_path, directory, reward=reward).verdicts([pair])
    assert verdicts["value"].to_pylist() == pytest.approx(plain_scores(directory, [text]), abs=1e-5)


def test_a_model_is_loaded_once_and_only_if_its_files_have_its_digest(tmp_path, classifier):
    scorer = Scorer(tmp_path, classifier)
    assert scorer.worker.take(scorer.model) == scorer.model.weights.digest
    assert scorer.worker.progress() == 1
    scorer.worker.take(scorer.model)
    assert scorer.worker.progress() == 1
    other = write_classifier(tmp_path / "other", "qwen3")
    torn = scorer.publish(other)
    weights = scorer.store.local_path(f"{torn.weights.key}/model.safetensors")
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(Damaged):
        scorer.worker.take(torn)


class Bomb:
    """Object that creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.fixture
def copy(tmp_path, classifier):
    """Copy of the classifier that a test may change."""
    shutil.copytree(classifier, tmp_path / "model")
    return tmp_path / "model"


def test_pickled_weights_are_never_opened(tmp_path, copy):
    marker = tmp_path / "ran"
    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    check_reward_model(copy)
    load_reward_model(copy)
    (copy / "model.safetensors").unlink()
    for load in (check_reward_model, load_reward_model):
        with pytest.raises(BadInput, match=r"[Pp]ickled weights"):
            load(copy)
    assert not marker.exists()


def test_code_in_the_directory_of_a_model_is_never_run(tmp_path, copy):
    marker = tmp_path / "ran"
    (copy / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    classes = ("AutoModelForSequenceClassification", "AutoConfig")
    edit_json(copy / "config.json", auto_map=dict.fromkeys(classes, "modeling_own.Own"))
    load_reward_model(copy)
    assert not marker.exists()


def test_a_good_directory_passes_the_check(classifier):
    assert check_reward_model(classifier, "{prompt}{completion}") > 10_000


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (shutil.rmtree, "no such directory"),
        (lambda path: write_classifier(path, labels=2), "one output.* 2 labels"),
        (lambda path: edit_json(path / "config.json", architectures=["LlamaForCausalLM"]), "found LlamaForCausalLM"),
        (lambda path: edit_json(path / "config.json", model_type="own"), "config.json"),
        (
            lambda path: edit_json(path / "config.json", vocab_size=20),
            r"model.embed_tokens.weight in .* size 354 x 64.* 20 x 64",
        ),
        (lambda path: (path / "config.json").write_text("{"), "config.json"),
        (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda path: (path / "model.safetensors").write_bytes(b"x" * 50), "model.safetensors is damaged"),
    ],
)
def test_a_directory_that_cannot_score_is_refused_in_one_line(copy, change, reason):
    change(copy)
    with pytest.raises(BadInput, match=reason) as refused:
        check_reward_model(copy)
    assert "\n" not in str(refused.value)


def test_a_template_without_the_completion_is_refused_in_one_line(classifier):
    with pytest.raises(BadInput, match="completion") as refused:
        check_reward_model(classifier, "{prompt}")
    assert "\n" not in str(refused.value)
