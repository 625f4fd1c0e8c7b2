"""Rollout engine that generates with vLLM servers."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

import numpy as np
from transformers import PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, EndpointDown, Quarantined, WorkerFailed, WorkerLost
from rheostat.models.config.context import longrope_context
from rheostat.models.config.engines import SamplingConfig, VllmEngine
from rheostat.models.engines.protocol import Completion, Generate, Request, SequenceScores, StepSums
from rheostat.models.engines.requests import (
    CompletionRow,
    build_rows,
    context_of,
    end_tokens,
    generation_settings,
    require_context,
    require_engine_room,
    suppressed_tokens,
    text_settings,
)
from rheostat.models.engines.vllm.client import (
    CompletionRequest,
    PromptScores,
    RequestDone,
    ServerClient,
    ServerInfo,
    StaleWeights,
    Stops,
)
from rheostat.models.engines.vllm.completions import PendingRequest, build_completions, build_drafts
from rheostat.models.engines.vllm.images import VisionInputEncoder
from rheostat.models.engines.vllm.servers import call_servers, find_servers, require_fit
from rheostat.models.records.media import ImageFiles, ImageSource
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.tokenizer import load_tokenizer
from rheostat.models.vision.processor import load_processor

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_LOADS: Final = 3
"""Maximum number of times that the policy is reloaded within one work unit because a server lost it."""
BATCHES: Final = 4
"""Number of full batches of prompts in one request for log-probs. The engine reports progress after each request."""


@dataclass(frozen=True, slots=True)
class _Policy:
    """Policy that the vLLM servers must serve, with the tokenizer and limits that requests need."""

    directory: Path
    adapter: Path | None
    digest: str
    tokenizer: PreTrainedTokenizerFast
    ends: tuple[int, ...]
    context: int | None
    longrope_context: int | None
    vision: VisionInputEncoder


class ServedEngine:
    """Rollout engine that generates with vLLM servers and accepts only completions that the loaded weights generated.
    If a server dies, its open requests are sent again with the same seeds; finished completions are kept. Random
    numbers depend only on the seeds. Log-probs also depend on the batch by rounding, so a sampled token may rarely
    differ. Several threads may generate at once, and one thread recovers from failures for all."""

    def __init__(self, config: VllmEngine, *, adapter_rank: int = 0) -> None:
        self.progress = 0
        self._config, self._adapter_rank = config, adapter_rank
        self._records_experts = self._needs_experts = False  # for the next work; for any work so far
        self._servers = find_servers(config, adapter_rank=adapter_rank, on_progress=self._on_progress)
        self._policy: _Policy | None = None
        self._images: ImageFiles | None = None
        self._abouts: dict[str, ServerInfo] = {}  # properties of every loaded server, by address
        self._ready: set[str] = set()  # addresses of servers that are assumed to serve the policy
        self._moved_bytes = 0
        self._repair_lock = threading.RLock()  # guards the recovery from failures, and the counts
        self._epoch = 0  # number of recoveries and reloads so far
        self._cause = ""  # log line that explains the latest failure
        self._counts: dict[str, RequestDone] = {}  # step sums in the latest answer of each server
        self._steps = StepSums()

    def producer(self) -> str:
        """Return the versions, platform and precision of the vLLM servers in use, as one text."""
        descriptions = {
            f"{self._config.kind} {about.vllm}, torch {about.torch}, {about.platform}, {about.dtype}, "
            f"{about.logprobs} log-probs, tensor parallel {about.tensor_parallel}"
            for about in self._abouts.values()
        }
        return "; ".join(sorted(descriptions)) or self._config.kind

    def load(self, directory: Path, policy: ModelVersion, *, adapter: Path | None = None) -> int:
        tokenizer, settings = load_tokenizer(directory), generation_settings(directory)
        self._policy = _Policy(
            directory=directory,
            adapter=adapter,
            digest=policy.digest,
            tokenizer=tokenizer,
            ends=end_tokens(tokenizer, settings),
            context=context_of(directory),
            longrope_context=longrope_context(text_settings(directory)),
            vision=VisionInputEncoder(load_processor(directory), self._images, suppressed=suppressed_tokens(settings)),
        )
        self._ready.clear()
        before = self._moved_bytes
        try:
            self._persist(lambda clients: None)
        except BaseException:
            self._policy = None
            raise
        return self._moved_bytes - before

    def show(self, images: ImageSource) -> None:
        if not isinstance(images, ImageFiles):
            raise BadInput(f"rollout.engine 'vllm' needs images in files, found {type(images).__name__}")
        self._images = images
        if self._policy is not None:
            self._policy.vision.files = images

    def record_experts(self, is_enabled: bool, /) -> None:
        self._records_experts = is_enabled
        if is_enabled and not self._needs_experts:
            self._needs_experts = True
            self._ready.clear()  # servers that cannot report experts no longer fit
            self._abouts.clear()

    def loaded_digest(self) -> str:
        clients = self._servers.running_clients()
        if self._policy is None or not clients:
            return ""
        try:
            proven = {client.fetch_digest() for client in clients}
        except EndpointDown as error:
            logger.warning("The vLLM server does not report which policy it serves: %s", error)
            return ""
        return self._policy.digest if proven == {self._policy.digest} else ""

    def sleep(self) -> None:
        self._policy = None
        self._servers.sleep()

    def close(self) -> None:
        self._policy = None
        self._servers.close()

    def step_sums(self) -> StepSums:
        return self._steps

    def score_continuations(
        self, prompts: Sequence[ModelInput], continuations: Sequence[Sequence[int]]
    ) -> list[tuple[float, ...]]:
        policy, longest = self._served(), max(map(len, continuations))
        require_context(prompts, longest, context=self._context(), owner=self._name_context_owner())
        size = BATCHES * self._config.max_batch_rows
        parts = [range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)]
        results: dict[int, tuple[float, ...]] = {}

        def ask(clients: Sequence[ServerClient]) -> None:
            for client, done in call_servers(compare, clients, [part for part in parts if part[0] not in results]):
                self._count(client, done)
            proven = {client.fetch_digest() for client in clients}
            if proven != {self._digest()}:
                results.clear()
                raise self._build_proof_error(proven)

        def compare(client: ServerClient, share: Sequence[range]) -> tuple[ServerClient, RequestDone]:
            assert share, "each server receives at least one part"
            for part in share:
                batch = [prompts[row] for row in part]
                logprobs_PC, done = client.score_continuations(
                    policy.digest, batch, continuations, vision=policy.vision
                )
                if not np.isfinite(logprobs_PC).all():
                    raise Quarantined(f"policy {self._digest()} computed NaN or infinite log-probs of continuations")
                results.update(zip(part, map(tuple, logprobs_PC.tolist()), strict=True))
                self._on_progress()
            return client, done

        self._persist(ask)
        return [results[row] for row in range(len(prompts))]

    @property
    def can_score_tokens(self) -> bool:
        """Whether no adapters are used on a CPU, with which vLLM crashes when it computes log-probs of prompts."""
        return not (self._adapter_rank and any(about.platform == "cpu" for about in self._abouts.values()))

    def score_tokens(self, tokens: Sequence[int], top: int, /) -> SequenceScores:
        """Return the log-probs of the tokens of a sequence, and the `top` most probable tokens at each position. Raises
        BadInput if the sequence is too long, or if `can_score_tokens` is false."""
        policy, owner = self._served(), self._name_context_owner()
        require_context([ModelInput.from_prompt(tokens)], 1, context=self._context(), owner=owner)
        if not self.can_score_tokens:
            raise BadInput(f"{self.producer()} cannot compute the log-probs of prompts with adapters on a CPU")
        if len(tokens) < 2:
            return SequenceScores((), ())
        answers: list[PromptScores] = []

        def ask(clients: Sequence[ServerClient]) -> None:
            client = clients[sum(tokens) % len(clients)]
            answers.append(client.score_tokens(policy.digest, tokens, top, banned=policy.vision.banned))
            self._count(client, answers[-1])
            self._on_progress()

        self._persist(ask)
        banned = {*policy.vision.banned}  # these tokens have the log-prob -inf
        scored = zip(tokens[1:], answers[-1].logprobs, strict=True)
        if not np.isfinite([logprob for token, logprob in scored if token not in banned]).all():
            raise Quarantined(f"policy {self._digest()} computed NaN or infinite log-probs of a prompt")
        return SequenceScores(answers[-1].logprobs, answers[-1].best)

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        return self.run_interleaved(lambda generate: generate(requests, sampling))

    def run_interleaved(self, work: Callable[[Generate], T]) -> T:
        """Call `work` with a function that generates completions, return its result, and verify that the servers still
        serve the policy. If the verification fails, `work` is called again. Raises WorkerLost after `MAX_LOADS`
        repetitions."""
        loads = 0
        while True:
            result, fault = _attempt(lambda: work(self._generate))
            proven = self._proofs()
            if proven == {self._digest()}:
                if fault is not None:
                    raise fault
                return cast(T, result)
            loads += 1
            self._load_again(self._build_proof_error(proven), loads=loads)

    def _proofs(self) -> set[str]:
        digests: set[str] = set()
        self._persist(lambda clients: digests.update(client.fetch_digest() for client in clients))
        return digests

    def _generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[Completion]]:
        """Generate completions without verifying afterwards that the servers still serve the policy."""
        policy = self._served()
        require_engine_room(requests, sampling, context=self._context(), owner=self._name_context_owner())
        drafts = self._open_drafts(build_rows(requests, longest=sampling.max_new_tokens), sampling)
        ends = [each.abandoned for each in requests if each.abandoned is not None]
        self._persist(lambda clients: self._write(drafts, sampling, clients, ends))
        completions = iter(build_completions(drafts, policy.tokenizer, sampling.stop, digest=policy.digest))
        return [[next(completions) for _ in request.seeds] for request in requests]

    def _open_drafts(self, rows: Sequence[CompletionRow], sampling: SamplingConfig) -> list[PendingRequest]:
        return build_drafts(rows, sampling, records_experts=self._records_experts)

    def _write(
        self,
        drafts: list[PendingRequest],
        sampling: SamplingConfig,
        clients: Sequence[ServerClient],
        ends: Sequence[threading.Event],
    ) -> None:
        """Generate with the given servers until every draft (unfinished completion) is finished. Raises CancelledError
        as soon as one of the events `ends` is set."""
        while unfinished := [draft for draft in drafts if draft.finish is None]:
            groups: dict[int, list[PendingRequest]] = {}
            for draft in unfinished:  # a group stays on one server, which computes its prompt once
                groups.setdefault(draft.row.request, []).append(draft)
            answered = call_servers(
                lambda client, share: self._request(
                    [draft for group in share for draft in group], sampling, client=client, ends=ends
                ),
                clients,
                list(groups.values()),
            )
            for client, done in answered:
                self._count(client, done)

    def _build_proof_error(self, proven: set[str]) -> StaleWeights:
        return StaleWeights(
            f"vLLM servers must serve policy {self._digest()} to the end, but serve {', '.join(map(repr, proven))}"
        )

    def _request(
        self,
        drafts: Sequence[PendingRequest],
        sampling: SamplingConfig,
        *,
        client: ServerClient,
        ends: Sequence[threading.Event],
    ) -> tuple[ServerClient, RequestDone]:
        """Request the missing tokens of drafts (unfinished completions). Return the client and its step sums."""
        for draft in drafts:
            draft.forget_fresh()
        requests = [draft.build_request(number) for number, draft in enumerate(drafts)]
        under_way = dict(enumerate(drafts))
        vision = self._served().vision
        stream = client.generate(self._digest(), requests, sampling, stops=self._stops(sampling), vision=vision)
        with closing(stream) as answers:
            for answer in answers:
                self._on_progress()
                if any(end.is_set() for end in ends):
                    raise CancelledError
                if isinstance(answer, RequestDone):
                    if under_way:
                        raise WorkerFailed(
                            f"{client} ended its response, but {format_count(len(under_way), 'completion')} did not end"
                        )
                    return client, answer
                if answer.id not in under_way:
                    raise WorkerFailed(f"{client} returned tokens of completion {answer.id}, which was not requested")
                under_way[answer.id].add(answer)
                if answer.finish is not None:
                    del under_way[answer.id]
        raise AssertionError("the stream of a vLLM response ended without its final message and without an error")

    def _persist(self, work: Callable[[tuple[ServerClient, ...]], None]) -> None:
        """Call `work` with clients of servers that serve the policy. Recover from failures, or raise WorkerLost."""
        restarts, loads, epoch = 0, 0, self._epoch
        while True:
            try:
                with self._repair_lock:
                    clients, epoch = self._loaded(), self._epoch
                return work(clients)
            except StaleWeights as error:
                loads += 1
                self._load_again(error, loads=loads, epoch=epoch)
            except EndpointDown as error:
                restarts += 1
                self._replace_server(error, restarts=restarts, epoch=epoch)

    def _load_again(self, error: StaleWeights, *, loads: int, epoch: int | None = None) -> None:
        """Let the next call reload the policy, unless another thread has requested this since repair `epoch`."""
        if loads > MAX_LOADS:
            raise WorkerLost(f"{error}. The policy was loaded {MAX_LOADS} times without success") from error
        with self._repair_lock:
            if epoch in (None, self._epoch):
                logger.warning("The policy is loaded into the vLLM server again, because of this error: %s", error)
                self._renew()
                self._counts.clear()  # a restarted server counts from 0

    def _replace_server(self, error: EndpointDown, *, restarts: int, epoch: int) -> None:
        """Let the next call replace a failed server, unless another thread has requested this since repair `epoch`."""
        with self._repair_lock:
            if epoch == self._epoch:
                cause = self._servers.find_cause()
                self._servers.prepare_restart(error)
                self._renew()
                self._cause = f"; the log of the server contains: {cause}" if cause else ""
        if restarts > self._config.max_restarts:
            raise WorkerLost(f"{error}, after {restarts - 1} restarts{self._cause}") from error

    def _renew(self) -> None:
        self._ready.clear()
        self._epoch += 1

    def _loaded(self) -> tuple[ServerClient, ...]:
        """Return clients of the servers, after loading the policy into those that do not serve it."""
        policy = self._served()
        clients = self._servers.start_clients(policy.directory, report_experts=self._needs_experts)
        missing = [client for client in clients if client.url not in self._ready]
        self._moved_bytes += sum(call_servers(lambda client, _: self._load(client, policy), missing, missing))
        urls = {client.url for client in clients}
        self._abouts = {url: about for url, about in self._abouts.items() if url in urls}
        return clients

    def _load(self, client: ServerClient, policy: _Policy) -> int:
        """Load the policy into a server and return the bytes loaded. Raises BadInput if the server does not fit."""
        about = self._abouts.get(client.url) or client.fetch_info()
        require_fit(client, about, self._config, adapter_rank=self._adapter_rank, report_experts=self._needs_experts)
        original, longest = policy.longrope_context, about.max_model_len
        if original is not None and longest > original:
            raise BadInput(
                f"{client} has max_model_len {longest}, at which vLLM, unlike Rheostat, uses the long factors of this "
                f"longrope model. Start the server with --max-model-len {original} or less"
            )
        loaded = client.load(policy.directory, policy.adapter)
        self._on_progress()
        if loaded.digest != policy.digest:
            raise StaleWeights(
                f"{client} must serve policy {policy.digest} after loading it, but it reports {loaded.digest!r}"
            )
        logger.info("%s loaded %s: %d bytes in %.3f s", client, loaded.digest, loaded.bytes, loaded.seconds)
        if client.url not in self._counts:
            self._probe_server(client)
        self._abouts[client.url] = about
        self._ready.add(client.url)
        return loaded.bytes

    def _probe_server(self, client: ServerClient) -> None:
        """Generate one token, so that unsupported shapes fail early, and store the server's initial step sums."""
        first = [CompletionRequest(id=0, input=ModelInput.from_prompt([0]), seed=0, max_tokens=1)]
        try:
            for answer in client.generate(
                self._digest(), first, SamplingConfig(), stops=Stops((), ()), vision=self._served().vision
            ):
                if isinstance(answer, RequestDone):
                    self._counts[client.url] = answer
        except EndpointDown as error:
            if cause := self._servers.find_cause():
                raise WorkerFailed(f"vLLM cannot run this policy. The server's log contains: {cause}") from error
            raise

    def _count(self, client: ServerClient, done: RequestDone) -> None:
        """Add a server's decoding steps since its previous sums. Sums older than another thread's are ignored."""
        with self._repair_lock:
            last = self._counts.get(client.url)
            if last is None or done.steps <= last.steps:
                return
            self._counts[client.url] = done
            self._add(done, last)

    def _add(self, done: RequestDone, last: RequestDone) -> None:
        so_far = self._steps
        self._steps = StepSums(
            steps=so_far.steps + done.steps - last.steps,
            sequences=so_far.sequences + done.sequences - last.sequences,
            sequences_squared=so_far.sequences_squared + done.sequences_squared - last.sequences_squared,
            seconds=so_far.seconds + done.seconds - last.seconds,
            sequence_seconds=so_far.sequence_seconds + done.sequence_seconds - last.sequence_seconds,
        )

    def _served(self) -> _Policy:
        assert self._policy is not None, "the engine is used before load()"
        return self._policy

    def _stops(self, sampling: SamplingConfig) -> Stops:
        return Stops(sampling.stop, self._served().ends)

    def _context(self) -> int | None:
        """Return the longest sequence, in tokens, that policy and servers accept, or None if there is no limit."""
        limits = [self._served().context, *(about.max_model_len for about in self._abouts.values())]
        return min((limit for limit in limits if limit is not None), default=None)

    def _name_context_owner(self) -> str:
        return "the policy" if self._context() == self._served().context else "the server"

    def _digest(self) -> str:
        return self._served().digest

    def _on_progress(self) -> None:
        self.progress += 1


def _attempt(work: Callable[[], T]) -> tuple[T | None, Quarantined | None]:
    """Call `work`. Return (result, None), or (None, error) if it raises Quarantined, perhaps due to wrong weights."""
    try:
        return work(), None
    except Quarantined as error:
        return None, error
