"""Names of models and datasets on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`, and their addresses `hf://…`.

This module does not access the network. `rheostat.infra.store.hub` resolves and fetches the names.
"""

import re
from dataclasses import dataclass, replace
from typing import Final, Literal, Self
from urllib.parse import parse_qsl, urlencode

from rheostat.infra.errors import BadInput
from rheostat.infra.user_files import DATA_SUFFIXES, PACKED_SUFFIXES

HubKind = Literal["model", "dataset"]
HF: Final = "hf://"

_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_FILE_SUFFIXES: Final = (
    *(*DATA_SUFFIXES, *PACKED_SUFFIXES, ".txt", ".zip", ".tar"),
    *(".safetensors", ".bin", ".pt", ".pth", ".onnx", ".gguf", ".png", ".jpg", ".jpeg", ".py", ".toml", ".yaml", ".md"),
)
"""Suffixes of file names. A text that ends with one of them is a path, and not the name of a repository."""


@dataclass(frozen=True, slots=True)
class HubAddress:
    """Address of a repository on the Hugging Face Hub, or of a file or folder in it."""

    kind: HubKind
    name: str
    """Name of the repository, `owner/name`."""
    revision: str = ""
    """Branch, tag or commit of the repository. Empty for the default branch."""
    file: str = ""
    """Path of a file or folder in the repository. Empty for the whole repository."""
    config: str = ""
    """Configuration (also called subset) of a dataset. Empty if none was chosen."""
    split: str = ""
    """Split of a dataset, such as `train`. Empty if none was chosen."""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, so that the files at this address cannot change."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def label(self) -> str:
        """Name of the repository for messages, with the revision if one is set. Commits are shortened to 8 digits."""
        revision = self.revision[:8] if self.is_pinned else self.revision
        return f"{self.name}@{revision}" if revision else self.name

    def pin(self, commit: str) -> Self:
        """Return the same address with this commit as its revision."""
        return replace(self, revision=commit)

    def text(self) -> str:
        """Return the address as text, such as `hf://models/owner/name@revision/file`."""
        from huggingface_hub import HfUri

        uri = HfUri(type=self.kind, id=self.name, revision=self.revision or None, path_in_repo=self.file)
        chosen = {key: value for key, value in (("config", self.config), ("split", self.split)) if value}
        return f"{uri.to_uri()}?{urlencode(chosen)}" if chosen else uri.to_uri()


def is_hub_name(text: str) -> bool:
    """Return whether a text has the form of a repository name on the Hugging Face Hub: `owner/name` or
    `owner/name@revision`.

    A text that begins with `.`, `/` or `~`, or that ends with the suffix of a file, is a path.

    >>> [is_hub_name(text) for text in ("Qwen/Qwen3-0.6B", "data/train.jsonl", "./models/policy", "a/b/c")]
    [True, False, False, False]
    """
    return _NAME.fullmatch(text) is not None and not has_file_suffix(text.partition("@")[0])


def has_file_suffix(name: str) -> bool:
    """Return whether a name ends with the suffix of a file of data, weights or text, such as `.jsonl`."""
    return name.lower().endswith(_FILE_SUFFIXES)


def parse_hub_name(text: str, kind: HubKind) -> HubAddress:
    """Convert the name of a repository, for which `is_hub_name` is true, to an address."""
    name, _, revision = text.partition("@")
    return HubAddress(kind, name, revision)


def parse_hub_address(text: str, kind: HubKind | None = None) -> HubAddress:
    """Parse an address on the Hugging Face Hub, `hf://…`.

    Raises BadInput if the address is not valid, or if it is not one of a repository of the kind `kind`.
    """
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError

    address, _, query = text.partition("?")
    chosen = dict(parse_qsl(query))
    try:
        uri = parse_hf_uri(address)
    except HfUriError:
        uri = None
    if uri is None or uri.type not in ("model", "dataset") or not chosen.keys() <= {"config", "split"}:
        raise BadInput(
            f"{text} is not an address of a model or dataset on the Hugging Face Hub. Write hf://owner/name for a "
            "model, hf://datasets/owner/name for a dataset, and append @revision or /file if you need them"
        )
    if kind is not None and uri.type != kind and not uri.path_in_repo:
        prefix = "datasets/" if kind == "dataset" else ""
        raise BadInput(
            f"{text} is the address of a {uri.type} on the Hub, but this setting needs a {kind}. Write "
            f"hf://{prefix}{uri.id}"
        )
    return HubAddress(uri.type, uri.id, uri.revision or "", uri.path_in_repo, **chosen)
