"""Discriminative reward models: sequence classifiers with one output, loaded from a directory. Code in it never runs.

Shapes: B rows of one micro-batch, T its padded width.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from rheostat.infra.errors import BadInput
from rheostat.models.config.context import usable_context
from rheostat.models.modeling.batching import pack
from rheostat.models.modeling.directory import weight_files
from rheostat.models.modeling.layout import MicroBatch, lay_out
from rheostat.models.modeling.policy import Architecture, first_line, load_weights
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.sequences import require_completion
from rheostat.models.untrusted_files.directory import check_untrusted_files, missing_directory_error

ENDLESS: Final = 10**9
"""Smallest value of a tokenizer's `model_max_length` that means "no limit"."""


class ClassifierKind(NamedTuple):
    """Kind of classifier that can be loaded as a reward model."""

    architecture: Architecture
    class_names: Mapping[str, str]
    """Name of the class in transformers for each `model_type`."""
    noun: str
    num_labels: int
    outputs: str
    """Description of the outputs for messages."""


SEQUENCE_CLASSIFIER: Final = ClassifierKind(
    AutoModelForSequenceClassification,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    noun="sequence classifier",
    num_labels=1,
    outputs="one output, which is the score",
)


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Loaded reward model with its tokenizer and its limits."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    context: int
    """Maximum length, in tokens, of a text that the model can score."""

    @property
    def pad(self) -> int | None:
        """Padding token by which the model finds the end of each sequence in a batch. If None, the model has no padding
        token and each sequence needs a separate forward pass."""
        pad: int | None = self.model.config.get_text_config().pad_token_id
        return pad


@dataclass(frozen=True, slots=True)
class ScoredTexts:
    """Score of one text as a finite number, or the reason why the text has no score."""

    value: float | None
    error: str | None
    steps: tuple[float, ...] | None = None
    """Score of each step of the text. None if there is no score, or if the model scores whole texts."""


def check_reward_model(path: Path, template: str | None = None) -> int:
    """Check that a model directory can be used to score texts with a prompt `template`, and return the number of
    parameters. Weights are not read. Raises BadInput if a check fails."""
    require_completion(template, source=f"reward model {path}")
    return int(load_reward_model(path, device="meta").model.num_parameters())


def load_reward_model(
    path: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kind: ClassifierKind = SEQUENCE_CLASSIFIER,
) -> RewardModel:
    """Load a reward model's weights and tokenizer. On the `meta` device, load only names and shapes of the weights.

    Raises BadInput if loading fails.
    """
    if not path.is_dir():
        raise missing_directory_error("reward model", path)
    try:
        check_untrusted_files(path)
    except BadInput as error:
        raise BadInput(f"reward model: {error}") from error
    config = _load_config(path, kind)
    try:
        weight_files(path)
    except BadInput as error:
        raise BadInput(f"reward model: {error}") from error
    tokenizer = _load_tokenizer(path)
    model = load_weights(kind.architecture, path, what="reward model", device=device, dtype=dtype)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        raise BadInput(
            f"reward model {path}: the tokenizer has {len(tokenizer)} tokens, but the model has embeddings for only "
            f"{model.get_input_embeddings().weight.shape[0]}. Take the tokenizer and the model from the same "
            "checkpoint"
        )
    text = config.get_text_config()
    longest = usable_context(getattr(text, "max_position_embeddings", None), text.to_dict())
    limits = (longest, tokenizer.model_max_length)
    known_limits = [int(limit) for limit in limits if isinstance(limit, int) and limit < ENDLESS]
    if not known_limits:
        raise BadInput(
            f"reward model {path}: neither config.json (max_position_embeddings) nor the tokenizer (model_max_length) "
            "sets the maximum length of a text. Add one of them"
        )
    return RewardModel(model=model.eval(), tokenizer=tokenizer, context=min(known_limits))


def score(
    reward: RewardModel, inputs: Sequence[ModelInput], *, batch_tokens: int, on_pass: Callable[[int, float], None]
) -> list[ScoredTexts]:
    """Score texts with a reward model and return one result per input, in order. Inputs of similar lengths share a
    forward pass of at most `batch_tokens` padded tokens. After each forward pass, `on_pass` is called with the number
    of its rows and its duration in seconds. An empty input, or one longer than the context, gets no score."""
    scores = [check_length(len(each), reward.context) for each in inputs]
    fit = tuple(row for row, scored in enumerate(scores) if scored.error is None)
    budget = batch_tokens if reward.pad is not None else 0
    for rows in pack(fit, [len(each) for each in inputs], budget=budget):
        began = time.perf_counter()
        values_B = _score_batch(reward, lay_out([inputs[row] for row in rows]))
        on_pass(len(rows), time.perf_counter() - began)
        for row, value, finite in zip(rows, values_B.tolist(), values_B.isfinite().tolist(), strict=True):
            scores[row] = ScoredTexts(value, None) if finite else ScoredTexts(None, f"the model's score is {value}")
    return scores


def check_length(length: int, context: int) -> ScoredTexts:
    """Return a result without a score, with an error if a text of `length` tokens is empty or exceeds the context."""
    if 0 < length <= context:
        return ScoredTexts(None, None)
    return ScoredTexts(None, f"the text has {length} tokens, expected 1 to {context}")


@torch.inference_mode()
def _score_batch(reward: RewardModel, batch: MicroBatch) -> torch.Tensor:
    """Return the reward model's float32 score of each row of a micro-batch. Padding is masked in attention."""
    lengths_B = torch.tensor([len(each) for each in batch.inputs])
    mask_BT = torch.arange(batch.tokens_BT.shape[1]) < lengths_B[:, None]
    tokens_BT = torch.from_numpy(batch.tokens_BT).masked_fill(~mask_BT, reward.pad or 0)
    device = reward.model.device
    output = reward.model(input_ids=tokens_BT.to(device), attention_mask=mask_BT.long().to(device))
    values_B: torch.Tensor = output.logits.float().squeeze(-1).cpu()
    return values_B


def _load_config(path: Path, kind: ClassifierKind) -> PretrainedConfig:
    where = path / "config.json"
    if not where.is_file():
        raise BadInput(
            f"reward model {path}: the directory has no config.json, so it is not a model directory in Hugging Face "
            "format. Set the path to a model directory"
        )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, ImportError, StrictDataclassError, RecursionError) as error:
        raise BadInput(
            f"{where}: transformers cannot load the configuration: {first_line(error)}. Use a complete copy of the "
            "model"
        ) from error
    classifier = kind.class_names.get(config.model_type)
    if classifier is None:
        raise BadInput(
            f"{where}: model_type is {config.model_type!r}, for which transformers has no {kind.noun}. "
            "Use another model"
        )
    if config.architectures != [classifier]:
        architectures = ", ".join(config.architectures or ["no architecture"])
        raise BadInput(
            f"{where}: the architecture must be the {kind.noun} {classifier}, found {architectures}. Use a "
            "model that was trained as a classifier"
        )
    if config.num_labels != kind.num_labels:
        raise BadInput(
            f"{where}: the classifier must have {kind.outputs}, but it has {config.num_labels} labels. Use another "
            "model"
        )
    return config


def _load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    if not (path / "tokenizer.json").is_file():
        raise BadInput(
            f"reward model {path}: the directory has no tokenizer.json. Save the model's fast tokenizer there with "
            "save_pretrained"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError, ImportError) as error:
        raise BadInput(
            f"reward model {path}: the tokenizer cannot be loaded: {first_line(error)}. Use a complete copy of the "
            "model"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise BadInput(
            f"reward model {path}: the model needs a fast tokenizer (of the library tokenizers), but it has a "
            f"{type(tokenizer).__name__}. Save a fast tokenizer there with save_pretrained"
        )
    return tokenizer
