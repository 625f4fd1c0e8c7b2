"""Server of a policy without a run: the door in front of Rheostat's own engine."""

import secrets
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import BundleRef
from rheostat.models.agents.door import Door
from rheostat.models.agents.replies import ReplyHead
from rheostat.models.agents.routes import AgentRoutes, read_form
from rheostat.models.agents.sampler import OpenEpisode, TurnLimits, TurnSampler
from rheostat.models.config.policy_server import PolicyServer
from rheostat.models.engines.local.engine import HuggingFaceEngine
from rheostat.models.engines.requests import context_of
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.calls import build_parser
from rheostat.models.untrusted_files.directory import check_untrusted_files, missing_directory_error

UNLIMITED: Final = 1 << 40
MAX_TURNS: Final = 1_000
"""Number of turns after which the server forgets earlier turns. Their chats are then rendered again."""
_CONCURRENT: Final = 256


class PolicyDoor:
    """Door in front of one policy, with one key for all clients. Concurrent requests are decoded together."""

    def __init__(self, config: PolicyServer, directory: Path, *, port: int, key: str) -> None:
        """Load the policy and start the server. Raises BadInput if the policy cannot be used or the port is in use."""
        if not directory.is_dir():
            raise missing_directory_error("policy", directory)
        check_untrusted_files(directory)
        form = read_form(directory)
        if config.parser != "auto":  # found for the tools of each request
            _check_parser(config.parser, form.tokenizer)
        self._engine = engine = HuggingFaceEngine(config.engine, adapter_rank=0)
        engine.load(directory, ModelVersion(0, BundleRef(key="", digest="", bytes=0)))
        self._decoder = engine.batch_continuously()
        sampler = TurnSampler(self._decoder.generate, config.sampling, 0, self._decoder.score_tokens)
        head = ReplyHead(directory.name, created=int(time.time()))
        routes = AgentRoutes(sampler, form, head, parser=config.parser, history=config.history)
        self._limits = TurnLimits(
            turn_tokens=config.sampling.max_new_tokens,
            episode_tokens=UNLIMITED,
            requests=UNLIMITED,
            concurrent=_CONCURRENT,
            context=context_of(directory) or config.context,
        )
        self._seed = secrets.randbits(63) if config.seed is None else config.seed
        with ExitStack() as opened:
            opened.callback(engine.close)
            opened.enter_context(self._decoder)
            self.door = Door(routes, port=port)
            opened.callback(self.door.close)
            self._opened = opened.pop_all()
        self.key = key
        self.forget()

    def forget(self) -> None:
        """Forget all turns. Requests that are open are still answered."""
        self._episode = OpenEpisode(self._seed, self._limits)
        self.door.admit(self._episode, key=self.key)

    def check(self) -> None:
        """Forget all turns if there are more than `MAX_TURNS`. Raises the error with which the engine has failed, if
        any."""
        if self._decoder.failure is not None:
            raise self._decoder.failure
        if self._episode.record.num_requests > MAX_TURNS:
            self.forget()

    def close(self) -> None:
        """Stop the server and release the policy."""
        self._opened.close()


def _check_parser(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput if there is no parser of tool calls with this name."""
    try:
        build_parser(name, tokenizer)
    except BadInput as error:
        raise BadInput(str(error).removeprefix("rollout.environment.")) from None
