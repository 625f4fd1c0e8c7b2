"""Judge that runs its model in this worker, with an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.models.config.engines import EngineConfig, SamplingConfig
from rheostat.models.config.texts import RULES_BEFORE, TextRules
from rheostat.models.config.verdicts import ChoiceVerdict, LogprobVerdict, VerdictConfig
from rheostat.models.engines.protocol import Completion, Request, StepSums, VisionEngine, build_engine
from rheostat.models.engines.requests import context_of
from rheostat.models.engines.sampling import sample_uniforms
from rheostat.models.judges.verdicts import Answer, Question
from rheostat.models.records.media import Gallery, ImageSource
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import ModelVersion
from rheostat.models.text.tokenizer import load_tokenizer, tokenize_questions
from rheostat.models.vision.processor import VisionProcessor, load_processor

_WEIGHED: Final = 1  # token count of an answer that is chosen by likelihood instead of generated
_Read = tuple[str, tuple[str, ...]]
"""Text and image digests of a question. Questions for which they are equal have the same prompt."""
_Prompts = dict[_Read, ModelInput]
_UNREAD: Final = Answer(text=None, probabilities=None, tokens=0, error=None)


class LocalJudge:
    """Judge that runs a model in this process. Free-text verdicts are generated, and verdicts with fixed choices are
    computed from the likelihoods of the choices.

    The same weights and questions give the same answers, regardless of earlier questions.
    """

    def __init__(
        self,
        engine: EngineConfig,
        sampling: SamplingConfig,
        *,
        verdict: VerdictConfig,
        chat: bool,
        threads: int,
        rules: TextRules = RULES_BEFORE,
    ) -> None:
        torch.set_num_threads(threads)
        self._engine = build_engine(engine)
        self._sampling = sampling
        self._verdict = verdict
        self._rules = rules
        self._chat = chat  # use a chat turn if the tokenizer has a chat template
        self._tokenizer: PreTrainedTokenizerFast | None = None
        self._processor: VisionProcessor | None = None
        self._images = Gallery()
        self._context: int | None = None

    @property
    def progress(self) -> int:
        """Counter that grows with every forward pass and every load, so that a stuck worker can be detected."""
        return self._engine.progress

    def load(self, directory: Path, model: ModelVersion) -> None:
        """Load the model from `directory`, whose files were verified before."""
        self._engine.load(directory, model)
        self._tokenizer, self._processor = load_tokenizer(directory), load_processor(directory)
        self._context = context_of(directory)

    def loaded_digest(self) -> str:
        """Return the digest of the loaded model."""
        return self._engine.loaded_digest()

    def producer(self) -> str:
        """Return the name of the engine and the versions that affect its results, as stored in verdict shards."""
        return self._engine.producer()

    def sleep(self) -> None:
        """Release the memory of the weights and the cache."""
        self._engine.sleep()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def step_sums(self) -> StepSums:
        """Return the engine's timing sums over all decoding steps since the start."""
        return self._engine.step_sums()

    def show(self, images: ImageSource) -> None:
        """Set the source from which the images of subsequent questions are read. Raises BadInput if the engine cannot
        process images."""
        if not isinstance(self._engine, VisionEngine):
            raise BadInput(
                f"engine {self.producer()} cannot process images, because it has no method `show`, but this judge "
                'reads images. Use another engine, or remove images = "prompt"'
            )
        self._images.source = images
        self._engine.show(images)

    def answer(self, questions: Sequence[Question]) -> list[Answer]:
        """Answer questions in one batch. A question that exceeds the model's context gets an invalid answer with an
        error."""
        choices = _choice_tokens(self._verdict)
        continuations = [self._tokens(choice) for choice in choices]
        room = max(map(len, continuations)) if choices else self._sampling.max_new_tokens
        prompts = self._prompts(questions)
        fitting = {read: prompt for read, prompt in prompts.items() if self._fits(len(prompt) + room)}
        fitting_questions = [question for question in questions if question.read in fitting]
        answers = iter(
            self._compare(fitting_questions, fitting, continuations)
            if choices
            else self._write(fitting_questions, fitting)
        )
        return [
            next(answers) if question.read in fitting else self._question_too_long(len(prompts[question.read]), room)
            for question in questions
        ]

    def _compare(
        self, questions: Sequence[Question], prompts: _Prompts, continuations: list[list[int]]
    ) -> list[Answer]:
        """Answer questions by the likelihoods of the verdict's choices as continuations of the prompt, without
        generating text.

        An answer contains the probabilities of all choices, or one choice that is sampled from them. `continuations`
        contains the tokens of each choice.
        """
        if not questions:
            return []
        likelihoods = self._engine.score_continuations(list(prompts.values()), continuations)
        logprobs = dict(zip(prompts, map(np.array, likelihoods), strict=True))
        choices = _choice_tokens(self._verdict)
        if isinstance(self._verdict, LogprobVerdict):
            shares = {read: _softmax(values).tolist() for read, values in logprobs.items()}
            return [Answer(None, dict(zip(choices, shares[q.read], strict=True)), _WEIGHED, None) for q in questions]
        samples = [_sample_choice(logprobs[q.read], self._sampling.temperature, q.seed) for q in questions]
        return [Answer(choices[index], None, _WEIGHED, None) for index in samples]

    def _write(self, questions: Sequence[Question], prompts: _Prompts) -> list[Answer]:
        """Answer questions by generating text. Questions with the same prompt share one request."""
        if not questions:
            return []
        places: dict[_Read, list[int]] = {read: [] for read in prompts}
        for index, question in enumerate(questions):
            places[question.read].append(index)
        requests = [
            Request(
                row=row,
                inputs=(prompts[read],) * len(indices),
                seeds=tuple(questions[index].seed for index in indices),
            )
            for row, (read, indices) in enumerate(places.items())
        ]
        answers = [_UNREAD] * len(questions)
        for indices, group in zip(places.values(), self._engine.generate(requests, self._sampling), strict=True):
            for index, completion in zip(indices, group, strict=True):
                answers[index] = _answer_from_text(completion)
        return answers

    def _prompts(self, questions: Sequence[Question]) -> _Prompts:
        """Tokenize each distinct prompt of the questions once, in the order of first appearance."""
        assert self._tokenizer is not None, "the model must be loaded before a question"
        reads = list(dict.fromkeys(question.read for question in questions))
        encoded = {digest: self._images.encoded(digest) for digest in {d for _, images in reads for d in images}}
        tokenized_questions = tokenize_questions(
            [text for text, _ in reads],
            [[encoded[digest] for digest in images] for _, images in reads],
            self._tokenizer,
            chat=self._chat,
            processor=self._processor,
            rules=self._rules,
        )
        return {read: tokenized.input for read, tokenized in zip(reads, tokenized_questions, strict=True)}

    def _tokens(self, choice: str) -> list[int]:
        """Encode a choice of the verdict as the token IDs whose likelihood is computed."""
        assert self._tokenizer is not None, "the model must be loaded before a question"
        tokens: list[int] = self._tokenizer(choice, add_special_tokens=False)["input_ids"]
        return tokens

    def _fits(self, length: int) -> bool:
        """Return whether a sequence of this number of tokens fits into the model's context."""
        return self._context is None or length <= self._context

    def _question_too_long(self, length: int, room: int) -> Answer:
        """Return an invalid answer for a question of `length` tokens that does not fit into the model's context
        together with an answer of up to `room` tokens."""
        return Answer(
            text=None,
            probabilities=None,
            tokens=0,
            error=f"the question has {length} tokens and its answer up to {room}, the context holds {self._context}",
        )


def _choice_tokens(verdict: VerdictConfig) -> list[str]:
    """Return the texts of a verdict's choices, or an empty list if the judge answers in free text."""
    if isinstance(verdict, LogprobVerdict):
        return [verdict.yes, verdict.no]
    return list(verdict.choices) if isinstance(verdict, ChoiceVerdict) and verdict.constrained else []


def _answer_from_text(completion: Completion) -> Answer:
    """Convert a generated completion into a judge's answer. A completion cut off at the length limit is an invalid
    answer."""
    is_cut_off = (
        completion.finish_reason is FinishReason.LENGTH
    )  # the missing rest may change the verdict: a 1 may be the start of a 10
    error = f"the answer did not end within {len(completion.tokens)} tokens" if is_cut_off else None
    return Answer(completion.text, None, len(completion.tokens), error)


def _sample_choice(logprobs_C: NDArray[np.float64], temperature: float, seed: int) -> int:
    """Sample the index of a choice from the log-probs of all choices (C). Returns the most likely choice at temperature
    0."""
    if temperature == 0:
        return int(logprobs_C.argmax())
    cumulative_C = _softmax(logprobs_C / temperature).cumsum()
    return min(int((cumulative_C <= sample_uniforms(seed, 1)[0] * cumulative_C[-1]).sum()), len(logprobs_C) - 1)


def _softmax(logprobs_C: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the softmax of log-probs of shape (C,)."""
    weights_C = np.exp(logprobs_C - logprobs_C.max())
    shares_C: NDArray[np.float64] = weights_C / weights_C.sum()
    return shares_C
