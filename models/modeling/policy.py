"""The policy: a decoder built from nothing, and how any policy is loaded, saved and measured."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from infra.errors import BadInput
from models.config.judges import JudgeReward
from models.config.policy import ModelShape, ScratchPolicy
from models.data.problems import Problem, identity
from models.judges.prompts import question_about, verdict_texts
from models.modeling.weights import load_weights, making_models
from models.text.tokenizer import train_tokenizer


def scratch_tokenizer(policy: ScratchPolicy, problems: Iterable[Problem]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on prompts and answers, worked ones included."""
    texts = chain.from_iterable((identity(p.prompt), p.worked or p.answer) for p in problems)
    return train_tokenizer(texts, vocab_size=policy.vocab_size, context=policy.context)


def judge_tokenizer(
    judge: ScratchPolicy, reward: JudgeReward, problems: Iterable[Problem], *, seed: int
) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a judge on its questions and verdicts, each as often: a verdict is one token then."""
    verdicts = verdict_texts(reward.verdict)
    questions = (question_about(p, p.worked or p.answer, reward=reward, seed=seed) for p in problems)
    texts = chain.from_iterable((question, *verdicts) for question in questions)
    return train_tokenizer(texts, vocab_size=judge.vocab_size, context=judge.context)


def scratch_config(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Describe the decoder."""
    kinds: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    return kinds[policy.architecture](
        vocab_size=len(tokenizer),
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size,
        num_hidden_layers=policy.layers,
        num_attention_heads=policy.heads,
        num_key_value_heads=policy.kv_heads,
        head_dim=policy.hidden_size // policy.heads,
        max_position_embeddings=policy.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def build_scratch(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> PreTrainedModel:
    """Initialise the decoder at random from the seed; the caller's random state stays as it was."""
    with making_models():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(scratch_config(policy, tokenizer))


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a directory that any user of transformers or vLLM can load."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def load_policy(directory: Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load weights, for training in float32; on the `meta` device only their names and shapes."""
    return load_weights(AutoModelForCausalLM, directory, what="policy", device=device, dtype=dtype)


def policy_shape(config: PretrainedConfig, *, parameters: int, source: str) -> ModelShape:
    """Read from its configuration what decides memory and length."""
    text = config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int):
        raise BadInput(f"policy {source}: config.json has no max_position_embeddings: its context is unknown")
    heads = text.num_attention_heads
    return ModelShape(
        parameters=parameters,
        context=context,
        layers=text.num_hidden_layers,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
    )


def scratch_shape(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast) -> ModelShape:
    """Describe the decoder without building it."""
    model = meta_scratch(policy, tokenizer)
    parameters = sum(weight.numel() for weight in model.parameters())
    return policy_shape(model.config, parameters=parameters, source="from scratch")


def meta_scratch(policy: ScratchPolicy, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Names and shapes of the decoder's weights."""
    with making_models(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(scratch_config(policy, tokenizer))
