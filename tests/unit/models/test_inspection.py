"""Models are inspected without building them: the numbers equal those of built models, and torch is not imported."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config

from rheostat.infra.demos import DEMOS
from rheostat.infra.errors import BadInput
from rheostat.infra.variants import check_implementation
from rheostat.models.config.engines import TransformersEngine, VllmEngine
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.config.policy_losses import (
    Cispo,
    ClipCov,
    Dppo,
    Gmpo,
    Gspo,
    KlCov,
    PolicyGradient,
    PpoClip,
    Sapo,
    Vespo,
)
from rheostat.models.data.problems import load_problems
from rheostat.models.engines.protocol import check_class
from rheostat.models.inspection.directory import inspect_directory
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.inspection.training import LOSS, LOSS_NAMED
from rheostat.models.modeling.adapters import outline
from rheostat.models.modeling.critic import build_meta_critic
from rheostat.models.modeling.directory import check_directory, meta_policy
from rheostat.models.modeling.policy import build_scratch, policy_shape, save_policy
from rheostat.models.text.tokenizer import scratch_tokenizer
from rheostat.tasks.config.run import load_config
from tests.support.demos import ArithmeticData
from tests.support.model_files import change_files

HOME = Path(__file__).parents[3]
CONFIGS = sorted(
    {*HOME.glob("configs/*.toml"), *DEMOS.glob("*/*.toml")}
    - {HOME / f"configs/{name}.toml" for name in ("retriever", "hub")}
)
KINDS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
LORA = LoraConfig(rank=3, targets=("q_proj", "down_proj"), dora=True)


def assert_same(inspected, built):
    """Compare outlines; the numbers that a layer keeps for its backward pass are a rule of thumb for built models."""
    assert 0.5 < inspected.kept_numbers / built.kept_numbers < 2
    assert replace(inspected, kept_numbers=built.kept_numbers, norm_numbers=built.norm_numbers) == built


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize(("layers", "heads", "kv_heads", "head_size"), [(1, 2, 1, 8), (3, 4, 4, 4), (2, 4, 2, 16)])
def test_the_outline_of_a_decoder_equals_that_of_the_model_of_transformers(
    tied, architecture, layers, heads, kv_heads, head_size
):
    decoder = DecoderSizes(architecture, 310, 16, 24, layers, heads, kv_heads, head_size, context=32, tied=tied)
    sizes = {"vocab_size": 310, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_size}
    config = KINDS[architecture](**sizes, max_position_embeddings=32, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert decoder.weights() == {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert_same(decoder.outline(), outline(model))
    assert decoder.outline().parameters == model.num_parameters()
    assert_same(decoder.critic(), outline(build_meta_critic(config)))
    assert decoder.shape() == policy_shape(config, parameters=model.num_parameters(), source="here")
    assert LORA.count_trained(decoder.critic()) == LORA.count_trained(outline(build_meta_critic(config)))


@pytest.fixture(params=KINDS)
def directory(request, tmp_path):
    """Directory of a policy as a run saves it."""
    policy = ScratchPolicy(architecture=request.param, hidden_size=16, intermediate_size=32, kv_heads=2)
    problems = load_problems(ArithmeticData(train_problems=64, heldout_problems=8), "train", 0)
    tokenizer = scratch_tokenizer(policy, problems)
    save_policy(build_scratch(policy, tokenizer, seed=0), tokenizer, tmp_path)
    return tmp_path


def test_the_outline_of_a_directory_equals_that_of_the_model_of_transformers(directory):
    config, _, parameters = check_directory(directory)
    inspected, tokenizer = inspect_directory(directory), AutoTokenizer.from_pretrained(directory)
    assert inspected.shape == policy_shape(config, parameters=parameters, source="here")
    assert_same(inspected.outline, outline(meta_policy(directory)))
    assert_same(inspected.critic(), outline(build_meta_critic(config)))
    assert type(inspected.tokenizer) is type(tokenizer)
    assert inspected.tokenizer.get_vocab() == tokenizer.get_vocab()
    assert inspected.tokenizer.chat_template == tokenizer.chat_template
    text = "16 pens <|eos|>"
    assert inspected.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]


def run_without_torch(code: str, argument: Path) -> None:
    """Run code in a new process and check that the code does not import torch."""
    code = f"import sys\nfrom pathlib import Path\n{code}\nassert 'torch' not in sys.modules"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(argument)], cwd=HOME, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.thorough_after(1)
def test_a_saved_directory_is_inspected_without_torch(directory):
    code = "from rheostat.models.inspection.directory import inspect_directory\n"
    run_without_torch(f"{code}inspect_directory(Path(sys.argv[1])).critic()", directory)


@pytest.mark.system
def test_the_input_checks_of_text_configurations_need_no_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(HOME)
    for path in CONFIGS:
        if path.parent.name == "vision" or load_config(path).policy.generates_images:
            continue  # these policies are inspected with their torch modules
        if path.parent.name == "agent":
            continue  # the check imports the agent in an environment with openai-agents
        config = load_config(path, ["update.lora.rank=4", 'rollout.engine={kind="transformers"}'])
        if path.stem == "distill":  # this configuration names a teacher directory
            tokenizer = scratch_tokenizer(config.policy, load_problems(config.data, "train", config.seed))
            save_policy(build_scratch(config.policy, tokenizer, seed=1), tokenizer, tmp_path / "teacher")
            config = load_config(path, [f'algorithm.distillation.teacher.path="{tmp_path / "teacher"}"'])
        (tmp_path / f"{config.name}.json").write_text(config.model_dump_json())
    code = (
        "from rheostat.models.commands.preflight import Inputs, check\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.json')):\n"
        "    assert check(Inputs.model_validate_json(path.read_text())).facts['parameters']\n"
        "    assert 'torch' not in sys.modules, path.stem\n"
    )
    assert len(CONFIGS) > 2
    run_without_torch(code, tmp_path)


def test_the_bundled_classes_pass_the_checks_of_user_classes():
    for engine in (TransformersEngine(), VllmEngine()):
        assert engine.ships_with("models")
        check_class(engine, name="engine")
    for loss in (PpoClip(), Gspo(), Cispo(), PolicyGradient(), Sapo(), Gmpo(), ClipCov(), KlCov(), Dppo(), Vespo()):
        assert loss.ships_with("models")
        check_implementation(loss, *LOSS, where="update.loss", named=LOSS_NAMED)


@pytest.mark.parametrize(
    "changes",
    [
        {"model.safetensors": {"model.norm.weight": None}},
        {"model.safetensors": 8},
        {"model.safetensors": None},
        {"config.json": {"hidden_size": 20}},
        {"config.json": {"vocab_size": 300}},
        {"config.json": {"num_hidden_layers": 3}},
        {"config.json": {"hidden_act": "nothing"}},
        {"config.json": {"architectures": ["BertForMaskedLM"]}},
        {"config.json": {"model_type": "nothing"}},
        {"config.json": "{"},
        {"tokenizer.json": "{"},
        {"tokenizer.json": None},
    ],
)
def test_a_damaged_directory_is_refused_with_the_same_message_as_by_building_the_model(directory, changes):
    change_files(directory, changes)
    with pytest.raises(BadInput) as expected:
        check_directory(directory)
    with pytest.raises(BadInput) as refused:
        inspect_directory(directory)
    assert str(refused.value) == str(expected.value)


def test_weights_of_more_layers_than_configured_are_inspected_as_transformers_loads_them(directory):
    change_files(directory, {"config.json": {"num_hidden_layers": 1, "layer_types": ["full_attention"]}})
    assert inspect_directory(directory).shape.parameters == check_directory(directory)[2]
