"""Discriminative reward models: small random classifiers, built and scored by plain transformers for comparison."""

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
    BertConfig,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
)

from infra.errors import BadInput, Damaged
from infra.store.bundles import publish_bundle
from infra.store.shards import read_shard, write_shard
from infra.store.storage import open_store
from models.config.judges import DirectoryRewardModel, ModelReward
from models.modeling.reward_model import check_reward_model, load_reward_model, score
from models.records.model_input import ModelInput
from models.records.schemas import ROLLOUT_SCHEMA, VERDICT_SCHEMA
from models.records.versions import ModelVersion
from models.records.work import JudgeWork
from models.workers.reward_model import RewardModelWorker
from tests.support.policies import DECODER, small_tokenizer

SHAPES = {
    "llama": (LlamaConfig, {**DECODER, "max_position_embeddings": 64}),
    "qwen3": (Qwen3Config, {**DECODER, "max_position_embeddings": 64}),
    "gpt2": (GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": (
        BertConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "initializer_range": 0.3,  # a first token that looks at the others
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
}
TEXTS = [f"Ana has {n} pens, buys {n * 7} and sells {n // 2}. " * (1 + n % 2) + "#" * (n % 5) for n in range(1, 24)]
REWARD = ModelReward(
    model=DirectoryRewardModel(path="unused"), name="liked", template="{prompt}{completion}", batch_tokens=200
)


def write_classifier(directory, architecture="llama", *, labels=1, padding_side="right", pad=True, template=None):
    tokenizer = small_tokenizer()
    config, shape = SHAPES[architecture]
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
    if template is None:
        (directory / "chat_template.jinja").unlink(missing_ok=True)
        stated.pop("chat_template", None)
    path.write_text(json.dumps(stated))
    return directory


def one_by_one(directory, texts):
    """Score with transformers alone, no batch and no padding."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt")).logits.item() for text in texts]


class Bench:
    """A run's store, with rollouts in it and a worker beside it."""

    def __init__(self, root, directory, *, reward=REWARD):
        self.store = open_store(str(root / "run"))
        self.model = ModelVersion(0, publish_bundle(self.store, directory, prefix="policies"))
        self.worker = RewardModelWorker(str(root), "run", "liked", reward, 1)

    def judge(self, pairs):
        empty = {"prompt_tokens": [], "completion_tokens": [], "logprobs": [], "finish_reason": "stop", "seed": 0}
        rows = [
            {"prompt_row": row // 2, "sample": row % 2, "prompt": prompt, "completion": completion, **empty}
            for row, (prompt, completion) in enumerate(pairs)
        ]
        table = pa.Table.from_pylist(rows, schema=ROLLOUT_SCHEMA)
        rollouts = write_shard(self.store, table, kind="rollouts", metadata={})
        return self.worker.judge(JudgeWork(iteration=1, rollouts=rollouts, model=self.model, seed=0))

    def verdicts(self, pairs):
        [ref] = self.judge(pairs).shards
        return read_shard(self.store, ref)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "bert"])
def test_batched_scores_are_those_of_plain_transformers_one_by_one(tmp_path, architecture):
    directory = write_classifier(tmp_path / "model", architecture)
    verdicts = Bench(tmp_path, directory).verdicts([("", text) for text in TEXTS])
    expected = one_by_one(directory, TEXTS)
    assert max(expected) - min(expected) > 0.1
    assert verdicts["value"].to_pylist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("batch_tokens", "fewest", "most"), [(1, 23, 23), (100, 4, 22), (10_000, 1, 3)])
def test_a_score_does_not_depend_on_its_neighbours(classifier, batch_tokens, fewest, most):
    reward = load_reward_model(classifier)
    inputs = [ModelInput.given(reward.tokenizer(text)["input_ids"]) for text in TEXTS]
    passes = []
    scores = score(reward, inputs, batch_tokens=batch_tokens, on_pass=lambda rows, seconds: passes.append(rows))
    assert [scored.value for scored in scores] == pytest.approx(one_by_one(classifier, TEXTS), abs=1e-4)
    assert fewest <= len(passes) <= most
    assert sum(passes) == len(TEXTS)


def test_the_tokenizers_padding_side_does_not_matter(tmp_path, classifier):
    left = write_classifier(tmp_path / "left", padding_side="left")
    pairs = [("", text) for text in TEXTS]
    first, second = (Bench(tmp_path / name, path) for name, path in (("a", classifier), ("b", left)))
    assert first.verdicts(pairs).equals(second.verdicts(pairs))


def test_a_decoder_without_a_pad_token_scores_one_text_at_a_time(tmp_path):
    directory = write_classifier(tmp_path / "model", pad=False)
    verdicts = Bench(tmp_path, directory).verdicts([("", text) for text in TEXTS[:5]])
    assert verdicts["value"].to_pylist() == pytest.approx(one_by_one(directory, TEXTS[:5]), abs=1e-4)


def test_verdicts_are_one_row_per_completion_in_order_and_repeat_themselves(tmp_path, classifier):
    bench = Bench(tmp_path, classifier)
    outcome = bench.judge([("2+2=", "4"), ("2+2=", "5"), ("3+3=", "6")])
    [ref] = outcome.shards
    verdicts = read_shard(bench.store, ref)
    assert verdicts.schema.remove_metadata() == VERDICT_SCHEMA
    rows = verdicts.select(["prompt_row", "sample", "vote", "attempt", "text", "error", "tokens"]).to_pylist()
    usual = {"vote": 0, "attempt": 0, "text": None, "error": None, "tokens": 0}
    assert rows == [{"prompt_row": row, "sample": sample, **usual} for row, sample in ((0, 0), (0, 1), (1, 0))]
    assert outcome.metrics == {"sequences": 3, "tokens": 3, "tokens_read": 15, "answers": 3, "invalid": 0}
    assert outcome.detail == {"lengths": [1, 1, 1]}
    assert outcome.timings["step_sequences"] == 3
    assert outcome.timings["steps"] >= 1
    bench.worker.sleep()
    assert bench.judge([("2+2=", "4"), ("2+2=", "5"), ("3+3=", "6")]).shards == (ref,)


def test_a_text_longer_than_the_context_is_invalid_and_never_cut(tmp_path, classifier):
    verdicts = Bench(tmp_path, classifier).verdicts([("", "1" * 400), ("", "fine")])
    assert verdicts["value"][0].as_py() is None
    assert "expected 1 to 64" in verdicts["error"][0].as_py()
    assert verdicts["value"][1].as_py() == pytest.approx(one_by_one(classifier, ["fine"])[0], abs=1e-5)


def test_a_score_that_is_not_finite_is_invalid(tmp_path):
    directory = write_classifier(tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    with torch.no_grad():
        model.score.weight.fill_(math.nan)
    model.save_pretrained(directory)
    bench = Bench(tmp_path, directory)
    outcome = bench.judge([("", "4")])
    [row] = read_shard(bench.store, outcome.shards[0]).to_pylist()
    assert (row["value"], row["error"], outcome.metrics["invalid"]) == (None, "the model's score is nan", 1)


def test_a_template_is_filled_in_once(tmp_path, classifier):
    bench = Bench(tmp_path, classifier, reward=REWARD.model_copy(update={"template": "Q {prompt} A {completion} {x}"}))
    verdicts = bench.verdicts([("{completion}", "{prompt} {0}")])
    expected = one_by_one(classifier, ["Q {completion} A {prompt} {0} {x}"])
    assert verdicts["value"].to_pylist() == pytest.approx(expected, abs=1e-5)


def test_without_a_template_the_chat_template_or_the_texts_themselves_are_read(tmp_path, classifier):
    reward = REWARD.model_copy(update={"template": None})
    chat = write_classifier(tmp_path / "chat", template="kept")
    plain = Bench(tmp_path / "a", classifier, reward=reward).verdicts([("2+2=", "4")])
    turns = Bench(tmp_path / "b", chat, reward=reward).verdicts([("2+2=", "4")])
    assert plain["value"].to_pylist() == pytest.approx(one_by_one(classifier, ["2+2=4"]), abs=1e-5)
    assert turns["value"].to_pylist() == pytest.approx(one_by_one(chat, ["user: 2+2=\nassistant: 4\n"]), abs=1e-5)


def test_a_completion_that_spells_a_special_token_is_invalid(tmp_path, classifier):
    verdicts = Bench(tmp_path, classifier).verdicts([("", "4<|eos|>5")])
    assert verdicts["value"].to_pylist() == [None]
    assert "<|eos|>" in verdicts["error"][0].as_py()


def test_a_model_is_loaded_when_it_is_named_and_only_if_it_is_what_its_digest_says(tmp_path, classifier):
    bench = Bench(tmp_path, classifier)
    assert bench.worker.take(bench.model) == bench.model.weights.digest
    assert bench.worker.progress() == 1
    bench.worker.take(bench.model)
    assert bench.worker.progress() == 1
    other = write_classifier(tmp_path / "other", "qwen3")
    torn = ModelVersion(0, publish_bundle(bench.store, other, prefix="policies"))
    weights = bench.store.local(f"{torn.weights.key}/model.safetensors")
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(Damaged):
        bench.worker.take(torn)


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_pickle_is_never_opened(tmp_path, classifier):
    directory, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(classifier, directory)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    check_reward_model(directory)
    load_reward_model(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="pickled weights are never loaded"):
        check_reward_model(directory)
    with pytest.raises(BadInput, match="pickled weights are never loaded"):
        load_reward_model(directory)
    assert not marker.exists()


def test_code_beside_a_model_is_never_run(tmp_path, classifier):
    directory, marker = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(classifier, directory)
    (directory / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    path = directory / "config.json"
    own = {"AutoModelForSequenceClassification": "modeling_own.Own", "AutoConfig": "modeling_own.Own"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": own}))
    load_reward_model(directory)
    assert not marker.exists()


def test_a_good_directory_passes_the_check(classifier):
    assert check_reward_model(classifier, "{prompt}{completion}") > 10_000


def test_what_cannot_score_is_bad_input_in_one_line(tmp_path, classifier):
    def refused(directory, reason, template=None):
        with pytest.raises(BadInput, match=reason) as caught:
            check_reward_model(directory, template)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "no such directory")
    refused(write_classifier(tmp_path / "two", labels=2), "one output, found 2 labels")
    refused(classifier, "completion", "{prompt}")

    def changed(name, change):
        directory = tmp_path / name
        shutil.copytree(classifier, directory)
        change(directory)
        return directory

    def edited(**keys):
        def edit(directory):
            path = directory / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | keys))

        return edit

    refused(changed("causal", edited(architectures=["LlamaForCausalLM"])), "found LlamaForCausalLM")
    refused(changed("kind", edited(model_type="own")), "config.json")
    refused(changed("small", edited(vocab_size=20)), "weights do not load|belong together")
    refused(changed("torn", lambda path: (path / "config.json").write_text("{")), "config.json")
    refused(changed("bare", lambda path: (path / "tokenizer.json").unlink()), "no tokenizer.json")
    refused(changed("cut", lambda path: (path / "model.safetensors").write_bytes(b"x" * 50)), "do not load")
