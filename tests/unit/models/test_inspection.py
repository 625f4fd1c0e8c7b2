"""Models described without building them: the same numbers as those of the built ones, and no torch to find them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from infra.errors import BadInput
from infra.variants import check_implementation
from models.commands.preflight import LOSS, LOSS_NAMED
from models.config.data import ArithmeticData
from models.config.engines import TransformersEngine, VllmEngine
from models.config.lora import LoraConfig
from models.config.objectives import Cispo, Gspo, PolicyGradient, PpoClip
from models.config.policy import ScratchPolicy
from models.data.problems import load_problems
from models.engines.protocol import check_class
from models.inspection.directory import DecoderSizes, inspect_directory
from models.modeling.adapters import outline
from models.modeling.critic import classifier_of
from models.modeling.directory import check_directory, meta_policy
from models.modeling.policy import build_scratch, policy_shape, save_policy
from models.text.tokenizer import scratch_tokenizer
from tasks.config.run import load_config

HOME = Path(__file__).parents[3]
CONFIGS = sorted({*HOME.glob("configs/*.toml")} - {HOME / "configs/retriever.toml"})
KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
LORA = LoraConfig(rank=3, targets=("q_proj", "down_proj"))


def assert_same(found, built):
    """Equal but for what a block keeps for its backward pass: of models that are built that is a rule of thumb."""
    assert 0.5 < found.kept_numbers / built.kept_numbers < 2
    thumb = {"kept_numbers": built.kept_numbers, "norm_numbers": built.norm_numbers}
    assert replace(found, **thumb) == built


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(("layers", "heads", "kv_heads", "head_size"), [(1, 2, 1, 8), (3, 4, 4, 4), (2, 4, 2, 16)])
def test_a_decoder_is_described_as_transformers_builds_it(tied, architecture, layers, heads, kv_heads, head_size):
    decoder = DecoderSizes(architecture, 310, 16, 24, layers, heads, kv_heads, head_size, context=32, tied=tied)
    config = KINDS[architecture](
        vocab_size=310,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_size,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert decoder.weights() == {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert_same(decoder.outline(), outline(model))
    assert decoder.outline().parameters == model.num_parameters()
    assert_same(decoder.critic(), outline(classifier_of(config)))
    assert decoder.shape() == policy_shape(config, parameters=model.num_parameters(), source="here")
    assert LORA.count_trained(decoder.critic()) == LORA.count_trained(outline(classifier_of(config)))


@pytest.fixture(params=KINDS)
def directory(request, tmp_path):
    """A policy as a run leaves it."""
    policy = ScratchPolicy(architecture=request.param, hidden_size=16, intermediate_size=32, kv_heads=2)
    tokenizer = scratch_tokenizer(
        policy, load_problems(ArithmeticData(train_problems=64, heldout_problems=8), "train", 0)
    )
    save_policy(build_scratch(policy, tokenizer, seed=0), tokenizer, tmp_path)
    return tmp_path


def test_a_directory_is_described_as_transformers_builds_it(directory):
    config, _, parameters = check_directory(directory)
    found = inspect_directory(directory)
    assert found.shape == policy_shape(config, parameters=parameters, source="here")
    assert_same(found.outline, outline(meta_policy(directory)))
    assert_same(found.critic(), outline(classifier_of(config)))
    other = AutoTokenizer.from_pretrained(directory)
    assert type(found.tokenizer) is type(other)
    assert found.tokenizer.get_vocab() == other.get_vocab()
    assert found.tokenizer.chat_template == other.chat_template
    assert found.tokenizer("16 pens <|eos|>")["input_ids"] == other("16 pens <|eos|>")["input_ids"]


def without_torch(code: str, *arguments: str) -> str:
    """Run code; it says at its end whether torch came in."""
    asked = f"import sys\n{code}\nprint('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", asked, *arguments], cwd=HOME, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_directory_that_a_run_left_is_described_without_torch(directory):
    code = "from pathlib import Path\nfrom models.inspection.directory import inspect_directory\n"
    assert without_torch(f"{code}inspect_directory(Path(sys.argv[1])).critic()", str(directory)) == "False"


@pytest.mark.system
def test_the_checks_of_configurations_whose_policies_read_text_need_no_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(HOME)
    for path in CONFIGS:
        if path.stem.startswith("vision") or load_config(path).policy.draws:
            continue  # which are described by their modules
        config = load_config(path, ["update.lora.rank=4", 'rollout.engine={kind="transformers"}'])
        if path.stem == "distill":  # the teacher is made first
            tokenizer = scratch_tokenizer(config.policy, load_problems(config.data, "train", config.seed))
            save_policy(build_scratch(config.policy, tokenizer, seed=1), tokenizer, tmp_path / "teacher")
            config = load_config(path, [f'algorithm.distillation.teacher.path="{tmp_path / "teacher"}"'])
        (tmp_path / f"{path.stem}.json").write_text(config.model_dump_json())
    code = (
        "from pathlib import Path\nfrom models.commands.preflight import Inputs, check\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.json')):\n"
        "    assert check(Inputs.model_validate_json(path.read_text()))['parameters']\n"
        "    assert 'torch' not in sys.modules, path.stem\n"
    )
    assert len(CONFIGS) > 2
    assert without_torch(code, str(tmp_path)) == "False"


def test_the_classes_that_ship_are_what_a_users_own_are_checked_for():
    for engine in (TransformersEngine(), VllmEngine()):
        assert engine.ships_with("models")
        check_class(engine, name="engine")
    for loss in (PpoClip(), Gspo(), Cispo(), PolicyGradient()):
        assert loss.ships_with("models")
        check_implementation(loss, *LOSS, where="update.loss", named=LOSS_NAMED)


def spoil_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_a_weight(directory):
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def cut_short(directory):
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


@pytest.mark.parametrize(
    "spoil",
    [
        drop_a_weight,
        cut_short,
        lambda directory: spoil_config(directory, hidden_size=20),
        lambda directory: spoil_config(directory, vocab_size=300),
        lambda directory: spoil_config(directory, num_hidden_layers=3),
        lambda directory: spoil_config(directory, hidden_act="nothing"),
        lambda directory: spoil_config(directory, architectures=["BertForMaskedLM"]),
        lambda directory: spoil_config(directory, model_type="nothing"),
        lambda directory: (directory / "config.json").write_text("{"),
        lambda directory: (directory / "tokenizer.json").write_text("{"),
        lambda directory: (directory / "tokenizer.json").unlink(),
        lambda directory: (directory / "model.safetensors").unlink(),
    ],
)
def test_what_is_wrong_with_a_directory_is_said_in_the_same_words(directory, spoil):
    spoil(directory)
    with pytest.raises(BadInput) as expected:
        check_directory(directory)
    with pytest.raises(BadInput) as found:
        inspect_directory(directory)
    assert str(found.value) == str(expected.value)


def test_a_layer_more_in_the_file_than_in_the_configuration_is_left_to_transformers(directory):
    spoil_config(directory, num_hidden_layers=1, layer_types=["full_attention"])
    assert inspect_directory(directory).shape.parameters == check_directory(directory)[2]
