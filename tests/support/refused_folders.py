"""Builders of the folders in `tests/unit/refusals/*.toml` whose files TOML cannot hold: models, images, environments.

Models are written once for all tests of a process, and copied.
"""

import os
import shutil
import sys
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, Lfm2Config, Phi3Config, PhimoeConfig, PreTrainedTokenizerFast

from rheostat.infra.store.runs import create_run
from rheostat.models.modeling.critic import build_meta_critic, classifier_from_policy
from rheostat.models.modeling.directory import check_directory
from rheostat.models.modeling.policy import build_scratch, save_policy
from tests.support.environments import leave_vllm
from tests.support.model_families import write_family
from tests.support.pictures import animation, picture
from tests.support.policies import ARCHITECTURES, DECODER, LONGROPE, TINY, VOCABULARY, small_tokenizer, write_policy
from tests.support.vision import write_seeing


def add_pipe(place: Path) -> None:
    """Add a pipe that nobody writes to: reading it blocks."""
    os.mkfifo(place / "pipe.jsonl")


def begin_retrain(place: Path) -> None:
    """Begin the retrain of a day that is past, without a result."""
    create_run(str(place / "runs"), "job-20200103", {"iterations": 2})


@cache
def _models() -> TemporaryDirectory:
    return TemporaryDirectory(prefix="refused-models-")


def copy_model(name: str, target: Path) -> None:
    """Copy one of the models below to a directory."""
    source = Path(_models().name) / name
    if not source.exists():
        _MODELS[name](source)
    shutil.copytree(source, target)


def _write_chat_model(path: Path) -> None:
    tokenizer = small_tokenizer()
    save_policy(build_scratch(TINY.model_copy(update={"context": 4096}), tokenizer, seed=0), tokenizer, path)


def _write_classifier(path: Path) -> None:
    copy_model("chat", path)
    config, tokenizer, _ = check_directory(path)
    save_policy(build_meta_critic(config).to_empty(device="cpu"), tokenizer, path)


def _write_critic(path: Path) -> None:
    copy_model("one key-value head", path.with_name("policy of the critic"))
    save_policy(classifier_from_policy(path.with_name("policy of the critic")), small_tokenizer(), path)


def _write_convolutions(path: Path) -> None:
    config = Lfm2Config(
        **{**DECODER, "vocab_size": VOCABULARY, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"]
    )
    save_policy(AutoModelForCausalLM.from_config(config), small_tokenizer(), path)


def _write_phimoe(path: Path) -> None:
    with patch.dict(ARCHITECTURES, phimoe=(PhimoeConfig, {**DECODER, "num_local_experts": 4})):
        write_policy(path, "phimoe")


def _write_longrope(path: Path, **settings: float) -> None:
    """Write a model that was first trained on 40 tokens and then, with other factors, on 128. `settings` are added to
    its settings of rotary positions."""
    changes = {**LONGROPE, "rope_parameters": {**LONGROPE["rope_parameters"], **settings}}
    with patch.dict(ARCHITECTURES, phi3=(Phi3Config, DECODER)):
        write_policy(path, "phi3", changes=changes)


_FAMILIES = ("bloom", "mamba", "minimax", "modernbert-decoder", "recurrent_gemma")
_MODELS = {
    "chat": _write_chat_model,
    "classifier": _write_classifier,
    "convolutions": _write_convolutions,
    "critic": _write_critic,
    "gpt2": lambda path: write_policy(path, "gpt2"),
    "idefics3": lambda path: write_seeing(path, "idefics3"),
    "one key-value head": lambda path: write_policy(path, changes={"num_key_value_heads": 1}),
    "longrope": _write_longrope,
    "longrope scaled": partial(_write_longrope, attention_factor=1.3),
    "phimoe": _write_phimoe,
    "policy": write_policy,
    **{family: partial(write_family, family) for family in _FAMILIES},
}


def add_chat_models(place: Path) -> None:
    """Write a policy for chats to `model`, a copy to `other`, and a reward model to `classifier`."""
    for name, source in {"model": "chat", "other": "chat", "classifier": "classifier"}.items():
        copy_model(source, place / name)


def add_other_models(place: Path) -> None:
    """Write policies and a critic that a setting does not fit, and policies of families that need settings."""
    for name in (
        "convolutions",
        "critic",
        "gpt2",
        "longrope",
        "longrope scaled",
        "one key-value head",
        "phimoe",
        "policy",
        *_FAMILIES,
    ):
        copy_model(name, place / name)


def add_tokenizers(place: Path) -> None:
    """Write a model without an EOS token to `no-eos`."""
    copy_model("policy", place / "no-eos")
    words = Tokenizer(WordLevel({"e": 0, "p": 1, "u": 2}, unk_token="u"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="u", pad_token="p").save_pretrained(place / "no-eos")


def add_images(place: Path) -> None:
    """Write a vision-language policy to `model`, its copy without image settings to `bare`, and images of all kinds."""
    for name in ("model", "bare"):
        copy_model("idefics3", place / name)
    (place / "bare/preprocessor_config.json").unlink()
    images = {
        "red.png": picture("red"),
        "blue.png": picture("blue"),
        "no-image.png": b"no image",
        "torn.jpg": picture(size=(300, 300), kind="JPEG")[:-400],
        "animated.gif": animation(),
        "long.png": picture(size=(201, 1)),
    }
    for name, encoded in images.items():
        (place / name).write_bytes(encoded)


def add_vllm(place: Path) -> None:
    """Write stamps of environments of vLLM for CPUs and GPUs to `$RHEOSTAT_ENGINES`, and link a Python without vLLM."""
    for platform in ("cpu", "cuda"):
        leave_vllm(platform)
    (place / "python-without-vllm").symlink_to(sys.executable)


def add_pipelines(place: Path) -> None:
    """Write a small text-to-image pipeline of every kind."""
    from tests.support.pipelines import write  # imports diffusers, which the other folders do not need

    for name in ("sd3", "flux", "qwen", "sd1", "sdxl"):
        _MODELS.setdefault(name, partial(write, name))
        copy_model(name, place / name)
