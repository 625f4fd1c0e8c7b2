"""A judge behind an OpenAI-compatible endpoint."""

from collections.abc import Sequence
from functools import partial

from models.config import SamplingConfig
from models.endpoints.client import Client, Request
from models.judges import Answer, Question
from models.judges.chat import check_request, read_answer, refusal, request_body
from models.rewards.config import EndpointJudge as EndpointConfig
from models.rewards.config import VerdictConfig

MAX_BODY_BYTES = 4 << 20


class EndpointJudge:
    """Ask a model over HTTP, several questions at once; answers come in the order of the questions.

    An endpoint that does not answer after all attempts raises EndpointDown, one that refuses raises WorkerFailed:
    neither ever becomes an answer.
    """

    def __init__(self, config: EndpointConfig, *, sampling: SamplingConfig, verdict: VerdictConfig) -> None:
        """Check what can be checked without the network. Raises BadInput."""
        check_request(config, sampling, verdict)
        self.progress = 0
        self._body = partial(request_body, judge=config, sampling=sampling, verdict=verdict)
        self._read = partial(read_answer, verdict=verdict)
        self._client = Client(config, "/chat/completions", max_bytes=MAX_BODY_BYTES, beat=self._beat)

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return one answer per question, in order."""
        return self._client.ask(
            [
                Request(body=self._body(question), seed=question.seed, answer=self._read, refusal=refusal)
                for question in questions
            ]
        )

    def _beat(self) -> None:
        self.progress += 1
