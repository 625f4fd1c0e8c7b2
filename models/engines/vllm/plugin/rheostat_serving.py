"""State of the server: a single policy, loaded in place from verified files and identified by its digest, or none."""

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from blake3 import blake3
from rheostat_experts import RecordedExperts
from rheostat_requests import Refused
from rheostat_steps import Steps
from transformers import AutoConfig
from vllm import AsyncLLMEngine
from vllm.lora.request import LoRARequest

CONTENTS = "bundle.json"
HEAD = "lm_head.weight"
IMAGES = ("preprocessor_config.json", "processor_config.json")
"""Names of the files with the settings of image preprocessing in a model directory."""
INCIDENTAL = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
"""Keys of config.json that are ignored when the server decides whether it can load another policy."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Directory of immutable files, with the digest of the file that lists their names and digests."""

    directory: Path
    digest: str
    files: dict[str, dict[str, object]]


class Serving:
    """State of one vLLM server: the policy that it serves, and the methods that load, verify and unload policies.
    Weights change only while a lock is held. During that time `digest` is empty."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self.engine = engine
        self.digest = ""
        self.adapter: LoRARequest | None = None
        self.steps = Steps(engine)
        self.experts = RecordedExperts(engine)
        self._config = engine.vllm_config
        self._shape = _read_shape(Path(self._config.model_config.model))
        self._lock = asyncio.Lock()
        self._base = ""  # digest of the weights in the workers
        self._loaded = ""  # last proven value of `digest`
        self._fingerprints: list[str] = []
        self._adapters = 0
        self._asleep = False
        self._banned: list[int] = []

    async def about(self) -> dict[str, object]:
        """Return the server settings that affect its results, such as precision, as JSON fields."""
        model, lora = self._config.model_config, self._config.lora_config
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "logprobs": str(model.logprobs_mode).removesuffix("_logprobs"),
            "max_model_len": model.max_model_len,
            "tensor_parallel": self._config.parallel_config.tensor_parallel_size,
            "lora_rank": 0 if lora is None else lora.max_lora_rank,
            "sleeps": model.enable_sleep_mode,
            "tells_experts": bool(await self.experts.find_layers()),
        }

    def require(self, digest: str) -> None:
        """Raise Refused unless the server serves the policy `digest`."""
        if digest != self.digest or not digest:
            raise Refused(
                f"the request is for policy {digest}, but the server serves {self.digest or 'none'}",
                status=409,
                digest=self.digest,
            )

    async def ban(self, tokens: list[int]) -> None:
        """Give tokens probability 0 in the log-probs of prompts. These are properties of the served policy, so a new
        list replaces the former one."""
        if tokens != self._banned:
            await self.engine.collective_rpc("rheostat_ban", args=(tokens,))
            self._banned = tokens

    async def verify_digest(self) -> str:
        """Return the digest of the served policy, or an empty string if the parameters have changed since they were
        loaded."""
        if self.digest and await self._fingerprint() != self._fingerprints:
            self.digest = self._loaded = self._base = ""
        return self.digest

    async def sleep(self) -> bool:
        """Stop serving the policy until the next load, and release the memory if the platform supports this. Returns
        whether the memory was released.

        A server with room for adapters keeps its base weights in host memory (level 1), because only adapters change.
        Any other server discards its weights (level 2), because the next policy has other weights.
        """
        async with self._lock:
            self.digest = ""
            if not self._config.model_config.enable_sleep_mode:
                return False
            keeps_base = self._config.lora_config is not None
            self._loaded, self._base = "", self._base if keeps_base else ""
            await self.engine.sleep(level=1 if keeps_base else 2, mode="abort")
            self._asleep = True
            return True

    async def wait_for_load(self) -> str:
        """Wait for a load in progress, and return the digest of the served policy."""
        async with self._lock:
            return self.digest

    async def load(self, directory: Path, *, adapter: Path | None, drain: bool) -> dict[str, object]:
        """Verify the files of a policy, load it and serve it. Open requests are aborted, or finished first if `drain`
        is set. After a failure nothing is served. Raises Refused if the directories do not contain verified files, or
        if the policy's shape differs from the shape of the server's model."""
        async with self._lock:
            start = time.perf_counter()
            self.digest = ""
            bundles = _open(directory), None if adapter is None else _open(adapter)
            num_bytes = await self._take(*bundles, mode="wait" if drain else "abort")
            self.digest = self._loaded
            return {"digest": self.digest, "bytes": num_bytes, "seconds": time.perf_counter() - start}

    async def _take(self, weights: Bundle, adapter: Bundle | None, *, mode: Literal["wait", "abort"]) -> int:
        digest = weights.digest
        if adapter is not None:
            digest = blake3(f"{weights.digest}+{adapter.digest}".encode()).hexdigest()
        if digest == self._loaded and await self._fingerprint() == self._fingerprints:
            return 0
        base, self._base, self._loaded = self._base, "", ""
        # vLLM's image caches do not depend on the weights, so outputs of the old vision tower must be dropped first.
        await self.engine.pause_generation(mode=mode, clear_cache=True)
        try:
            await self.ban([])  # the next policy may generate tokens that this one must not
            await self._wake("weights")
            keeps_base = weights.digest == base and await self._fingerprint() == self._fingerprints
            num_bytes = 0 if keeps_base else await self._load_weights(weights)
            num_bytes += await self._load_adapter(adapter)
            await self._wake("kv_cache")
            await self.engine.reset_prefix_cache()
            self._fingerprints = await self._fingerprint()
            await self.engine.update_weight_version(digest)
        finally:
            await self.engine.resume_generation()
        self._base, self._loaded = weights.digest, digest
        return num_bytes

    async def _load_weights(self, weights: Bundle) -> int:
        num_bytes = await asyncio.to_thread(_verify, weights)
        shape = _read_shape(weights.directory)
        if differing := sorted(
            name for name in shape.keys() | self._shape.keys() if shape.get(name) != self._shape.get(name)
        ):
            raise Refused(
                f"the model in {weights.directory} differs from the one with which the server was started in "
                f"{', '.join(differing)}. Start a server for this model"
            )
        files = [str(weights.directory / name) for name in sorted(weights.files) if name.endswith(".safetensors")]
        if not files:
            raise Refused(f"{weights.directory} contains no safetensors file, only {', '.join(sorted(weights.files))}")
        await self.engine.collective_rpc("rheostat_load", args=(files,))
        return num_bytes

    async def _load_adapter(self, adapter: Bundle | None) -> int:
        if self.adapter is not None:
            await self.engine.remove_lora(self.adapter.lora_int_id)
            self.adapter = None
        if adapter is None:
            return 0
        num_bytes = await asyncio.to_thread(_verify, adapter)
        self._adapters += 1
        request = LoRARequest(adapter.digest, self._adapters, str(adapter.directory))
        await self.engine.add_lora(request)
        self.adapter = request
        return num_bytes

    async def _wake(self, tag: str) -> None:
        if self._asleep:
            self._asleep = not await self.engine.wake_up([tag])

    async def _fingerprint(self) -> list[str]:
        fingerprints: list[str] = await self.engine.collective_rpc("rheostat_fingerprint")
        return fingerprints


def _open(directory: Path) -> Bundle:
    path = directory / CONTENTS
    try:
        data = path.read_bytes()
        files: dict[str, dict[str, object]] = json.loads(data)["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{path} is not a valid list of the files in a stored model: {error}") from error
    return Bundle(directory=directory, digest=blake3(data).hexdigest(), files=files)


def _verify(bundle: Bundle) -> int:
    """Compute the digests of all files of a bundle and return their total size in bytes. Raises Refused if a digest
    differs from the recorded one."""
    for name, file in bundle.files.items():
        path = bundle.directory / name
        try:
            digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
        except OSError as error:
            raise Refused(f"{path} cannot be read: {error}") from error
        if digest != file["digest"]:
            raise Refused(f"{path} is damaged: its digest must be {file['digest']}, but it is {digest}")
    return sum(int(str(file["bytes"])) for file in bundle.files.values())


def _read_shape(directory: Path) -> dict[str, object]:
    """Read everything about a model that may not change when another policy is loaded: its configuration, the shapes of
    its tensors, and its image preprocessing settings.

    A policy of another shape must be refused. Otherwise vLLM would compute wrong results for a changed configuration,
    keep old values for missing tensors, or crash on a tensor of another shape.
    """
    # Loaded by transformers, because a trained policy is saved with all default settings written out, while a directory
    # from elsewhere may omit them.
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    shape: dict[str, object] = {name: value for name, value in config.to_dict().items() if name not in INCIDENTAL}
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as opened:  # the header: its length in 8 bytes, then JSON
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        shape |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    for file in (directory / name for name in IMAGES):
        if file.is_file():
            shape |= {f"{name} of {file.name}": setting for name, setting in json.loads(file.read_bytes()).items()}
    if config.tie_word_embeddings:  # a tied head may be stored a second time
        shape.pop(HEAD, None)
    return shape
