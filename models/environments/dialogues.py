"""Episodes in which a model plays the user (simulated user). Does not import torch.

The model's replies depend only on its weights, the problem, the seed and the turns. Each reply is sampled with a seed
derived from the episode and the turn, so a shard is bit-reproducible if the engine is deterministic. An endpoint is
reproducible only if its server applies the seeds.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock

from rheostat.infra.errors import BadInput
from rheostat.infra.processes.episodes import EnvironmentMessage, EnvironmentStep, EpisodeRequest
from rheostat.models.config.episodes import DialogueEnvironment
from rheostat.models.environments.responders import TurnAnswer
from rheostat.models.environments.user_view import Transcript, fill_instructions
from rheostat.models.environments.users import LocalUser, RemoteUser, Reply, SimulatedUser
from rheostat.models.records.seeds import derive_seed
from rheostat.models.records.versions import ModelVersion

_SILENT = EnvironmentStep((), done=False)


class Dialogues:
    """Environment in which a model plays the user of a dialogue. All episodes that wait for a reply are answered in one
    call of the model."""

    def __init__(self, settings: DialogueEnvironment) -> None:
        """Create the simulated user without loading its model.

        Raises BadInput if an endpoint's settings are invalid.
        """
        self._settings = settings
        self._final = None if settings.final_turn_pattern is None else re.compile(settings.final_turn_pattern)
        self._user, self._held = _build_user(settings)
        self._turn = Lock()  # held during a call, because several batches share the model
        self._replies: dict[str, tuple[str, ...]] = {}
        self._answered = 0

    @property
    def progress(self) -> int:
        """Counter that grows with every answered turn and every forward pass or request of the model, so that a stuck
        worker can be detected."""
        return self._answered + self._user.progress

    def load(self, directory: Path, model: ModelVersion) -> None:
        """Load the model of the simulated user from `directory`. Raises BadInput if the model is behind an endpoint."""
        if self._held is None:
            raise BadInput(
                f"{self._settings.run.where}: the simulated user is behind an endpoint, so its model cannot be loaded "
                "in this process"
            )
        self._held.load(directory, model)

    def sleep(self) -> None:
        """Release the GPU memory of the simulated user's weights."""
        if self._held is not None:
            self._held.sleep()

    def answer(self, asked: Sequence[EpisodeRequest], numbers: Sequence[int]) -> list[TurnAnswer]:
        """Answer the last turn of each episode, with one call of the simulated user's model. Episodes without turns are
        started.

        Each element of `asked` contains the problem and all turns of an episode.
        """
        with self._turn:
            answers: dict[int, TurnAnswer] = {}
            waiting: list[tuple[int, Transcript, int]] = []
            for index, each in enumerate(asked):
                try:
                    instructions = fill_instructions(self._settings.instructions, each.problem)
                except ValueError as error:
                    answers[index] = TurnAnswer(None, str(error))
                    continue
                at_once = self._answer_without_user(each)
                if at_once is None:
                    waiting.append((index, self._build_transcript(each, instructions), _derive_reply_seed(each)))
                else:
                    answers[index] = TurnAnswer(at_once)
            transcripts, seeds = [each for _, each, _ in waiting], [seed for *_, seed in waiting]
            began = time.monotonic()
            replies = self._user.reply(transcripts, seeds) if waiting else []
            share = (time.monotonic() - began) / max(1, len(waiting))
            answers |= {
                index: replace(self._read(asked[index], reply), seconds=share)
                for (index, *_), reply in zip(waiting, replies, strict=True)
            }
            self._answered += len(asked)
            return [answers[index] for index in range(len(asked))]

    def end(self, episodes: Sequence[str], numbers: Sequence[int]) -> None:
        """Delete the stored replies of the simulated user in episodes that are over."""
        with self._turn:
            for name in episodes:
                self._replies.pop(name, None)

    def close(self) -> None:
        """Close the engine of the simulated user's model, if the model is loaded in this process."""
        if self._held is not None:
            self._held.close()

    def _answer_without_user(self, asked: EpisodeRequest) -> EnvironmentStep | None:
        """Return the environment's answer if the simulated user does not need to reply to the turn, else None.

        No reply is needed before the first turn, after a turn that matches `final_turn_pattern`, and after the last
        allowed turn if no reply can end the episode with a reward.
        """
        if not asked.turns:
            self._replies[asked.episode] = ()
            return _SILENT
        if self._final is not None and self._final.search(str(asked.turns[-1]["text"])):
            return EnvironmentStep((), done=True)
        if len(asked.turns) == self._settings.max_turns and not self._settings.endings:
            return _SILENT
        return None

    def _build_transcript(self, asked: EpisodeRequest, instructions: str) -> Transcript:
        """Build the dialogue of an episode so far, from the policy's turns in `asked` and the stored replies of the
        simulated user."""
        turns = tuple(str(turn["text"]) for turn in asked.turns)
        return Transcript(instructions, turns, self._replies[asked.episode])

    def _read(self, asked: EpisodeRequest, reply: Reply) -> TurnAnswer:
        """Store the simulated user's reply, and convert it into the environment's answer to the policy's turn.

        If the reply contains one of the configured `endings` (texts that end a dialogue), the first of them ends the
        dialogue with its reward.
        """
        if reply.failure:
            return TurnAnswer(None, reply.failure)
        self._replies[asked.episode] += (reply.text,)
        places = {ending: reply.text.find(ending) for ending in self._settings.endings}
        ending = min((each for each, place in places.items() if place >= 0), key=lambda each: places[each], default="")
        if ending:
            return TurnAnswer(EnvironmentStep((), done=True, reward=self._settings.endings[ending]))
        return TurnAnswer(EnvironmentStep((EnvironmentMessage(self._settings.run.role, reply.text),), done=False))


def _build_user(settings: DialogueEnvironment) -> tuple[SimulatedUser, LocalUser | None]:
    """Create the simulated user that the settings describe. The second returned value is the same object if its model
    is loaded in this process, or None if the model is behind an endpoint."""
    model = settings.model
    if model.endpoint is not None:
        return RemoteUser(model.endpoint, settings.sampling), None
    assert model.local_engine is not None, "a model in this process has an engine"
    user = LocalUser(model.local_engine, settings.sampling, chats=model.uses_chat_template, rules=model.text_rules)
    return user, user


def _derive_reply_seed(asked: EpisodeRequest) -> int:
    """Derive the seed of the simulated user's reply from the episode's seed and the number of turns so far."""
    return derive_seed("user", asked.seed, len(asked.turns))
