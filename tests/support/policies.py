"""Small random policies for tests and benchmarks: a model and a tokenizer in a directory."""

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rheostat.infra.store.bundles import BundleRef
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.policy import DirectoryPolicy, ScratchPolicy
from rheostat.models.data.problems import load_problems
from rheostat.models.modeling.adapters import add_adapters, save_adapters
from rheostat.models.modeling.policy import build_scratch, load_policy, save_policy
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import PolicyWork
from rheostat.models.text.tokenizer import scratch_tokenizer, train_tokenizer
from rheostat.models.workers.preparation import PreparationWorker
from tests.support.chat_templates import tokenizer_of
from tests.support.demos import ArithmeticData

CONTEXT, VOCABULARY, WIDTH = 256, 354, 64

DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
}

CLASSIFIERS = {
    "llama": (LlamaConfig, {**DECODER, "max_position_embeddings": 64}),
    "qwen3": (Qwen3Config, {**DECODER, "max_position_embeddings": 64}),
    "gpt2": (GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "bert": (
        BertConfig,
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "initializer_range": 0.3,  # so that the first token attends to the others
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
}
"""Configuration class and shape of the architectures with which reward models are tested."""

LONGROPE = {
    "max_position_embeddings": CONTEXT,
    "original_max_position_embeddings": 40,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
"""Settings of a Phi 3 that was first trained on 40 tokens, and on more with other factors."""

ARCHITECTURES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, DECODER),
    "qwen3": (Qwen3Config, DECODER),
    "mistral": (MistralConfig, {**DECODER, "sliding_window": 12}),
    "mixtral": (MixtralConfig, {**DECODER, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {**DECODER, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "initializer_range": 0.1},
    ),
    "gpt2": (GPT2Config, {"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": CONTEXT}),
}


@cache
def small_tokenizer():
    texts = [
        f"Ana has {n} pens, buys {n + 3} and sells {n // 2}. How many? {n}+{n + 3}={2 * n + 3}" for n in range(200)
    ]
    return train_tokenizer(texts, vocab_size=VOCABULARY, context=CONTEXT)


def write_policy(
    directory: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    eos_share: float = 0.03,
    changes: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write a random model whose every token is EOS with about the given probability, and its tokenizer.

    `changes` replaces parts of the architecture's shape.
    """
    tokenizer = small_tokenizer()
    config, usual = ARCHITECTURES[architecture]
    shape = {**usual, "tie_word_embeddings": False, **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config(
                **shape,
                vocab_size=VOCABULARY,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
            )
        )
    with torch.no_grad():
        # A bias made of weights: one direction outgrows all others, so that the last norm makes it √width.
        model.get_input_embeddings().weight[:, 0] = 3.0
        model.lm_head.weight[tokenizer.eos_token_id, 0] += math.log(eos_share * VOCABULARY) / math.sqrt(
            model.config.hidden_size
        )
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):  # of a router, which would send every token where that direction leads
                weight[:, 0] = 0
    save_policy(model, tokenizer, directory)


DATA = ArithmeticData(train_problems=64, heldout_problems=8)

TINY = ScratchPolicy(hidden_size=16, intermediate_size=16, layers=1, heads=2, kv_heads=1, context=64)


def make_policy(folder: Path, policy: ScratchPolicy | DirectoryPolicy, *, seed: int = 0) -> Outcome:
    work = PolicyWork(policy=policy, data=DATA, seed=seed)
    return PreparationWorker(str(folder), "run", threads=1).make_policy(work)


def write_chat_policy(
    directory: Path, published: str, *, likely: Mapping[str, float], seed: int = 0, **shape: int
) -> None:
    """Write a random small model with the tokenizer and chat template of a published one.

    `likely` are shares that tokens have about, wherever they may stand. `shape` are changes to the model's
    configuration.
    """
    tokenizer = tokenizer_of(published)
    config = LlamaConfig(
        **{**DECODER, "num_hidden_layers": 1, "max_position_embeddings": 1024, **shape},
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 3.0
        for token, share in likely.items():
            bias = math.log(share * len(tokenizer)) / math.sqrt(WIDTH)
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(token), 0] += bias
    save_policy(model, tokenizer, directory)


def write_scratch(directory: Path, policy: ScratchPolicy = TINY, *, data: ArithmeticData = DATA, seed: int = 0) -> Path:
    """Write the model directory of a policy built from nothing, with a tokenizer trained on a task's problems."""
    tokenizer = scratch_tokenizer(policy, load_problems(data, "train", 0))
    save_policy(build_scratch(policy, tokenizer, seed=seed), tokenizer, directory)
    return directory


def write_policy_and_teachers(place: Path) -> None:
    """Write a policy to `model`, and to `small`, `other` and `fewer` teachers that do not go with the policy."""
    write_scratch(place / "model")
    write_scratch(place / "small", TINY.model_copy(update={"context": 32}))
    write_scratch(place / "other", data=DATA.model_copy(update={"operations": 2}))
    write_scratch(place / "fewer", TINY.model_copy(update={"vocab_size": 320}))


def write_adapter(base: Path, directory: Path, lora: LoraConfig, *, ref: BundleRef, seed: int = 0) -> None:
    """Write an adapter of a model directory, whose deltas are about as large as the weights."""
    model = load_policy(base)
    add_adapters(model, lora, base=ref)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if ".lora_B." in name:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(index + seed))
    directory.mkdir(exist_ok=True)
    save_adapters(model, directory)
