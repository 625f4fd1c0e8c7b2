"""Encoders of sentence-transformers, created with random weights or loaded from a directory."""

import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path, format_path
from rheostat.models.config.retriever import EncoderConfig
from rheostat.models.untrusted_files.directory import check_untrusted_files, missing_directory_error

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder, SentenceTransformer

Floats = NDArray[np.float32]

INSTALL: Final = "pip install 'sentence-transformers==6.2.0'"
MODULES: Final = "modules.json"
"""Name of the file that marks a sentence-transformers directory."""
SAFELY: Final = {"use_safetensors": True}
"""Options for loading models that exclude pickle files, which could run code."""
SPECIAL: Final = ("[PAD]", "[CLS]", "[SEP]")


def require_library(where: str) -> None:
    """Raise BadInput with the installation command if sentence-transformers is not installed.

    `where` is the command or setting that needs the library.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise BadInput(f"{where}: the package sentence-transformers is not installed. Run: {INSTALL}")


def build_scratch(start: EncoderConfig, directory: Path, *, texts: Iterable[str], max_tokens: int, seed: int) -> None:
    """Write a BERT encoder with random weights, and a tokenizer trained on the texts, to a directory. `start` contains
    the size of the encoder. The same arguments give the same bytes."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())  # the WordPiece trainer numbers its tokens differently each time
    trained.normalizer = normalizers.BertNormalizer()
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trained.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=start.vocab_size, special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(texts, trainer)
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, model_max_length=max_tokens, **names)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=start.hidden_size,
        num_hidden_layers=start.layers,
        num_attention_heads=start.heads,
        intermediate_size=4 * start.hidden_size,
        max_position_embeddings=max_tokens,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def check_directory(path: Path, where: str) -> Path:
    """Return the local path of an encoder's directory. Raises BadInput if the directory is not an encoder or needs code
    from other libraries. The message names the setting `where`."""
    require_library(where)
    here = fetch_path(path)
    if not here.is_dir():
        raise missing_directory_error(where, path)
    check_untrusted_files(here)
    try:
        kinds = [each["type"] for each in json.loads((here / MODULES).read_text())]
    except FileNotFoundError:
        kinds = []
        if not (here / "config.json").is_file():
            contents = ", ".join(sorted(each.name for each in here.iterdir())[:5]) or "no file"
            raise BadInput(
                f"{where} {format_path(path)}: the directory of an encoder must contain {MODULES} or config.json, "
                f"found {contents}. Set the path to a sentence-transformers or transformers model"
            ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BadInput(
            f"{where} {format_path(path)}: {MODULES} is not a valid list of modules: {error}. Copy or download the "
            "model again."
        ) from error
    for kind in kinds:
        if not str(kind).startswith("sentence_transformers."):
            raise BadInput(
                f"{where} {format_path(path)}: {MODULES} contains the module {kind!r}, but only modules of "
                "sentence_transformers are loaded. Use another model."
            )
    return here


def open_encoder(path: Path, where: str, *, max_tokens: int | None = None) -> "SentenceTransformer":
    """Load an encoder from a sentence-transformers directory or a plain transformers directory. For a plain encoder,
    the output at the first token is used as the embedding.

    Raises BadInput, which names the setting `where`, if loading fails.
    """
    here = check_directory(path, where)
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    with _loading(path, where):
        if (here / MODULES).is_file():
            encoder = SentenceTransformer(str(here), local_files_only=True, model_kwargs={**SAFELY})
        else:
            reader = Transformer(str(here), model_kwargs={**SAFELY})
            pooling = Pooling(reader.get_embedding_dimension(), "cls")
            encoder = SentenceTransformer(modules=[reader, pooling], similarity_fn_name="dot")
    if max_tokens is not None:
        encoder.max_seq_length = max_tokens
    encoder.eval()
    return encoder


def open_cross_encoder(path: Path, where: str, *, max_tokens: int, seed: int) -> "CrossEncoder":
    """Load a cross-encoder. A plain encoder gets a new head with one output, initialized with `seed`. Raises BadInput,
    which names the setting `where`, if loading fails."""
    here = check_directory(path, where)
    import torch
    from sentence_transformers import CrossEncoder

    torch.manual_seed(seed)
    with _loading(path, where):
        cross_encoder: CrossEncoder = CrossEncoder(
            str(here), num_labels=1, max_length=max_tokens, local_files_only=True, model_kwargs={**SAFELY}
        )
    cross_encoder.eval()
    return cross_encoder


@contextmanager
def _loading(path: Path, where: str) -> Iterator[None]:
    """Run the block, which loads the model in `path`, and raise its exceptions as BadInput.

    `where` is the configuration key that the message names.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{where} {format_path(path)}: the encoder cannot be loaded: {reason}. Use a complete copy of the model."
        ) from error


class Retriever:
    """Dual encoder that embeds texts for retrieval. The embedding of a text may differ in rounding, depending on the
    other texts of its batch."""

    def __init__(self, path: Path, where: str) -> None:
        self._model = open_encoder(path, where)

    def embed(self, texts: Sequence[str]) -> Floats:
        """Embed N texts as unit vectors of shape (N, D). The dot products of the vectors are cosine similarities."""
        return self._model.encode([*texts], batch_size=64, normalize_embeddings=True, show_progress_bar=False)

    def cosine(self, left: str, right: str) -> float:
        """Return the cosine similarity of two texts, from -1 to 1. Each text is embedded in a separate batch."""
        one, other = self.embed([left])[0], self.embed([right])[0]
        return float(np.clip(one @ other, -1, 1))
