"""Tool `search` for policies: a retriever returns the passages of a file that are most similar to a query.

An answer depends only on its call. The retriever and the passages are loaded once for each process and shared by all
episodes.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from rheostat.infra.episode_runner import ToolBox, ToolError, build_schemas, parse_step, parse_turn
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.processes.episodes import DescribedTools, EnvironmentMessage, EnvironmentStep, EpisodeRequest
from rheostat.infra.store.inputs import format_path
from rheostat.models.config.environments import SearchEnvironment
from rheostat.models.data.messages import read_text
from rheostat.models.data.rows import read_rows
from rheostat.models.retrieval.encoders import Retriever


class Index:
    """Search index of N passages, read from a file and embedded in D dimensions."""

    def __init__(self, retriever: Path, corpus: Path, column: str, version: int) -> None:
        """Read and embed the passages. `version` is the version of the rules for reading (`FileRules.version`).

        Raises BadInput if the retriever cannot be loaded or the file has no passages.
        """
        input_errors, self.passages = InputErrors(), list[str]()
        for place, row in read_rows(corpus, [column], input_errors, version=version):
            with input_errors.collect(place):
                self.passages.append(read_text(place, row[column], column))
        input_errors.check()
        if not self.passages:
            raise BadInput(
                f"rollout.environment.corpus is {format_path(corpus)}, but this file contains no passages. Set it to "
                "a file with at least one passage"
            )
        self._retriever = Retriever(retriever, "rollout.environment.retriever")
        self._passages_ND = self._retriever.embed(self.passages)

    def nearest(self, query: str, count: int) -> list[str]:
        """Return the `count` passages that are most similar to the query, best first. Equally similar passages are in
        the order of the file."""
        cosine_N = self._passages_ND @ self._retriever.embed([query])[0]
        return [self.passages[place] for place in np.argsort(-cosine_N, kind="stable")[:count].tolist()]


load_index = cache(Index)


class SearchTool:
    """Environment that answers the policy's calls of the tool `search` with passages of a file."""

    def __init__(self, settings: SearchEnvironment, *, describes: DescribedTools) -> None:
        """Store the settings. Retriever and passages are loaded by `ready` or the first call."""
        self._settings = settings
        self._box = ToolBox([self._tool()])
        self.schemas: Sequence[object] = build_schemas(self._box.tools) if describes != "none" else []
        """Schema of the only tool, or an empty list if `describes` is "none"."""

    def ready(self) -> None:
        """Load the retriever and the passages. Raises BadInput if they cannot be loaded."""
        self._index()

    def kill(self) -> None:
        """Do nothing, because no process was started."""

    def step(self, asked: EpisodeRequest) -> tuple[EnvironmentStep | None, str | None]:
        """Answer the calls in the last turn of an episode. A turn without a call ends the episode.

        Returns the answer and None, or None and the reason for the failure.
        """
        if not asked.turns:
            return EnvironmentStep((), done=False), None
        observation = parse_step(self._box.step(parse_turn(asked.turns[-1], len(asked.turns) - 1)), role="tool")
        return EnvironmentStep(
            tuple(EnvironmentMessage(**message) for message in observation["messages"]), done=observation["done"]
        ), None

    def end(self, closed: Sequence[str]) -> None:
        """Do nothing. Other environments release an episode's state here, but this tool keeps none."""

    def _index(self) -> Index:
        """Return the search index, which is loaded at the first call in the process and then shared."""
        settings = self._settings
        return load_index(settings.retriever, settings.corpus, settings.text_column, settings.version)

    def _tool(self) -> Callable[[str], str]:
        def search(query: str) -> str:
            """
            Search for passages. Returns the most similar ones, numbered.

            Args:
                query: What to look for.
            """
            if not isinstance(query, str) or not query.strip():
                raise ToolError("search: expected a text as query")
            passages = self._index().nearest(query, self._settings.passages)
            return "\n".join(f"{number}. {text}" for number, text in enumerate(passages, start=1))

        return search
