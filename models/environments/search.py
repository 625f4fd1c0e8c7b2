"""The policy's tool `search`: passages of a file that a retriever finds nearest to a query.

An answer follows from its call alone. Retriever and passages are loaded once in a process, whoever asks.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from infra.episode_runner import ToolBox, ToolError, observed, schemas_of, turn_of
from infra.errors import BadInput, Complaints
from infra.processes.episodes import Asked, EnvironmentStep, Said
from infra.store.inputs import written
from models.config.environments import SearchEnvironment
from models.data.files import read_rows, text_of
from models.retrieval.encoders import Retriever


class Index:
    """The passages of a file, N of them, embedded in D numbers."""

    def __init__(self, retriever: Path, corpus: Path, column: str) -> None:
        """Raises BadInput where there is no retriever, or no passage."""
        complaints, self.passages = Complaints(), list[str]()
        for place, row in read_rows(corpus, [column], complaints):
            with complaints.kept(place):
                self.passages.append(text_of(place, row[column], column))
        complaints.check()
        if not self.passages:
            raise BadInput(f"rollout.environment.corpus {written(corpus)}: expected passages, found none")
        self._retriever = Retriever(retriever, "rollout.environment.retriever")
        self._passages_ND = self._retriever.embed(self.passages)

    def nearest(self, query: str, count: int) -> list[str]:
        """Return so many passages, the most similar first; of equals the one that stands first."""
        cosine_N = self._passages_ND @ self._retriever.embed([query])[0]
        return [self.passages[place] for place in np.argsort(-cosine_N, kind="stable")[:count].tolist()]


index_of = cache(Index)


class SearchTool:
    """Answers the calls of episodes."""

    def __init__(self, settings: SearchEnvironment, *, describes: bool) -> None:
        """Load nothing yet."""
        self._settings = settings
        self._box = ToolBox([self._tool()])
        self.schemas: Sequence[object] = schemas_of(self._box.tools) if describes else []
        """Of the one tool."""

    def ready(self) -> None:
        """Load retriever and passages. Raises BadInput where they cannot be had."""
        self._index()

    def kill(self) -> None:
        """Nothing is started."""

    def step(self, asked: Asked) -> tuple[EnvironmentStep | None, str | None]:
        """Answer the calls of an episode's last turn; without one the episode is over."""
        if not asked.turns:
            return EnvironmentStep((), done=False), None
        found = observed(self._box.step(turn_of(asked.turns[-1], len(asked.turns) - 1)), role="tool")
        return EnvironmentStep(tuple(Said(**message) for message in found["messages"]), done=found["done"]), None

    def end(self, closed: Sequence[str]) -> None:
        """Nothing of an episode is kept."""

    def _index(self) -> Index:
        return index_of(self._settings.retriever, self._settings.corpus, self._settings.text_column)

    def _tool(self) -> Callable[[str], str]:
        def search(query: str) -> str:
            """
            Search for passages. Returns the most similar ones, numbered.

            Args:
                query: What to look for.
            """
            if not isinstance(query, str) or not query.strip():
                raise ToolError("search: expected a text as query")
            found = self._index().nearest(query, self._settings.passages)
            return "\n".join(f"{number}. {text}" for number, text in enumerate(found, start=1))

        return search
