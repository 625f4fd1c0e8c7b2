"""Computation of rule rewards in separate processes, which are killed if a completion takes too long.

Reward functions process text that a policy generated, and may be untrusted code, so they may hang, raise or crash their
process. In this case only the score of that completion is missing, with a reason. If the process was killed, stopped or
got no CPU time from the machine, the completion is scored again in a new process, and its score is missing only if this
process ends in the same way. Outside a sandbox, any program could have sent a signal such as SIGKILL, so a completion
is never blamed for such an end: after `MAX_ENDS` ends the worker is lost, and nothing is written for the shard.

Users' functions run in a process that imports no code of this project. Functions of this project run in another
process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Final, cast

from rheostat.infra.errors import BadInput, WorkerLost
from rheostat.infra.processes.child import (
    MAX_ENDS,
    ProcessEnded,
    rheostat_interpreter,
    user_interpreter,
)
from rheostat.infra.processes.functions import CallResult, FunctionProcess, RunFunction
from rheostat.infra.processes.restarting import RestartingProcess
from rheostat.models.config.reward_terms import RuleReward, Segmentation
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.records.media import ImageSource
from rheostat.models.rewards.rules import build_reward
from rheostat.models.rollouts.groups import ChatMessage
from rheostat.models.text.steps import Spans, StepValues, split_steps

Value = float | StepValues | Spans
"""Score that a reward gives to one completion: a number, or one number for each step, token or turn."""
NO_TOKEN_TEXTS: Final = "the completion's tokens do not spell its text"
"""Reason for missing scores of steps or tokens: the completion's tokens, decoded separately, do not add up to its
text."""


@dataclass(frozen=True, slots=True)
class Case:
    """Completion to score, with all data that a reward function may receive."""

    prompt: str
    completion: str
    answer: str
    tokens: tuple[str, ...] | None = None
    """Text of each token of the completion, or None if no reward needs the texts or if they do not add up to the
    completion."""
    where: str = "a completion"
    """Name of the completion in error messages, such as its shard and row."""
    images: tuple[str, ...] = ()
    """Digests of the images that are passed to reward functions."""
    messages: tuple[ChatMessage, ...] = ()
    """Messages of an episode, starting with the messages of the prompt. Empty if the completion is not an episode."""
    turns: tuple[int, ...] = ()
    """Index of the first token of each turn. Empty if the completion is not an episode."""
    turn_texts: tuple[str, ...] = ()
    """Text that the policy generated in each turn. Empty if the completion is not an episode."""

    @property
    def chat(self) -> list[ChatMessage]:
        """Prompt and completion as chat messages, as reward functions receive them."""
        if self.messages:
            return list(self.messages)
        texts = {"user": self.prompt, "assistant": self.completion}
        return [ChatMessage(role=role, content=text, name=None) for role, text in texts.items()]


ReferenceCheck = Callable[[str], object]
"""Function that raises ValueError if a reward cannot use a reference answer."""
OURS = "rheostat.models.rewards."
"""Prefix of the module names of Rheostat's built-in reward functions. Functions of other modules are the user's."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Raw scores of one completion by all rule rewards (rewards that are functions), in the configured order. A missing
    score is None. `error` is the first error as `term: reason`, or None."""

    values: tuple[Value | None, ...]
    error: str | None
    feedback: Mapping[str, str] = field(default_factory=dict)
    """Feedback on the completion by reward term. Terms without feedback are omitted."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Reward functions that run in the same process, with the handle of that process."""

    functions: tuple[RunFunction, ...]
    place: RestartingProcess[FunctionProcess]


class Evaluator:
    """Client of the processes that run reward functions. A process is started when needed, and started again after it
    has ended."""

    def __init__(self, scoring: ScoringConfig) -> None:
        self._scoring = scoring
        self.done = 0
        """Number of completions scored so far. Another thread may read it."""
        self._media: ImageSource | None = None
        self._functions = [rule.function for rule in scoring.rules]
        cuts = [steps for rule in scoring.rules if (steps := rule.segmentation) is not None and steps.may_hang]
        what = f"rewards {scoring.rule_terms}"
        self._parts: dict[bool, _Part] = {}
        for ours in (True, False):
            there = [each for each in (*self._functions, *map(_build_cut_function, cuts)) if _is_ours(each) == ours]
            if there:
                sandbox = "scoring.sandbox" if scoring.sandbox == "bubblewrap" else ""
                interpreter = rheostat_interpreter() if ours else user_interpreter(scoring.python, sandbox=sandbox)
                start = partial(FunctionProcess, there, interpreter, what=what, seconds=scoring.timeout_seconds)
                self._parts[ours] = _Part(tuple(there), RestartingProcess(start, what=what))

    def start(self) -> None:
        """Start the processes, and let them import the reward functions. Raises BadInput if a reward cannot be used."""
        for part in self._parts.values():
            part.place.start()  # start all processes before waiting for one
        for part in self._parts.values():
            part.place.ready()

    def evaluate(self, cases: Sequence[Case], media: ImageSource | None = None) -> list[Verdict]:
        """Score completions in order with all rule rewards.

        A completion that hangs or crashes a process takes up to twice `timeout_seconds`, plus two process starts.
        `media` provides the images of the completions, which are read only for functions that accept images. Raises
        WorkerLost if processes are repeatedly killed from outside.
        """
        verdicts = []
        self._media = media
        try:
            self.start()
            for case in cases:
                verdicts.append(self._score_case(case))
                self.done += 1
        except BaseException:
            self.close()  # a value of this call may still be in the pipe, and the next call must not read it
            raise
        return verdicts

    def try_images(self, case: Case, media: ImageSource) -> str | None:
        """Score one completion with each reward function that accepts images, to test that images are handled. Return
        the first error as `term: reason`, or None."""
        self.start()
        self._media = media
        for function, term, rule in zip(self._functions, self._scoring.rule_terms, self._scoring.rules, strict=True):
            part = self._parts[_is_ours(function)]
            if not part.place.ready().takes(part.functions.index(function), "images"):
                continue
            try:
                value, result = self._compute_value(function, rule, case, left=self._scoring.timeout_seconds)
            except ProcessEnded as end:
                return f"{term}: {end}"
            if value is None:
                return f"{term}: {result.reason}"
        return None

    def find_terms_without_images(self) -> list[str]:
        """Return the names of the reward terms whose functions have no parameter `images`."""
        self.start()
        pairs = zip(self._functions, self._scoring.rule_terms, strict=True)
        parts = [(self._parts[_is_ours(function)], function, term) for function, term in pairs]
        return [
            term
            for part, function, term in parts
            if not part.place.ready().takes(part.functions.index(function), "images")
        ]

    def close(self) -> None:
        """Kill the processes that run reward functions, and their child processes."""
        for part in self._parts.values():
            part.place.close()

    def _score_case(self, case: Case) -> Verdict:
        """Score one completion with all rule rewards. If a reward ends its process, the scores of this and the
        remaining rewards are missing."""
        values: list[Value | None] = []
        errors: list[str] = []
        feedback: dict[str, str] = {}
        seconds_left = self._scoring.timeout_seconds
        for function, term, rule in zip(self._functions, self._scoring.rule_terms, self._scoring.rules, strict=True):
            try:
                value, result = self._compute_value(function, rule, case, left=seconds_left)
            except ProcessEnded as end:
                errors.append(f"{term}: {end}")
                values += [None] * (len(self._functions) - len(values))
                break
            seconds_left = max(seconds_left - result.seconds, 0.0)
            values.append(value)
            if result.reason is not None:
                errors.append(f"{term}: {result.reason}")
            if result.feedback:
                feedback[term] = result.feedback
        return Verdict(tuple(values), errors[0] if errors else None, feedback)

    def _compute_value(
        self, function: RunFunction, rule: RuleReward, case: Case, *, left: float
    ) -> tuple[Value | None, CallResult]:
        """Score one completion with one rule reward. Returns the score, or None if it is missing, and the result of the
        call.

        `left` is the number of seconds that the call may take.
        """
        if not rule.scores_parts:
            result = self._call_function(function, case, left=left)
            return cast(float | None, result.value), result
        if rule.granularity == "turn":
            turns = list(case.turn_texts)
            result = self._call_function(function, case, left=left, named={function.part: turns}, expected=len(turns))
            spans = None if result.value is None else Spans(case.turns, cast(tuple[float, ...], result.value))
            return spans, result
        parts = case.tokens if rule.segmentation is None else self._split_steps(rule.segmentation, case)
        if parts is None:
            return None, CallResult(None, NO_TOKEN_TEXTS, 0.0)
        named = {function.part: list(parts)}
        result = self._call_function(function, case, left=left, named=named, expected=len(parts))
        value = (
            None if result.value is None else StepValues(tuple(map(len, parts)), cast(tuple[float, ...], result.value))
        )
        return value, result

    def _split_steps(self, steps: Segmentation, case: Case) -> list[str]:
        """Split a completion into steps. If the user's pattern could take very long, the completion is split in a
        process that can be killed."""
        if not steps.may_hang:
            return split_steps(case.completion, steps)
        result = self._call_function(_build_cut_function(steps), case, left=self._scoring.timeout_seconds, expected=-1)
        lengths = cast(tuple[float, ...], result.value)
        assert lengths is not None, f"a pattern that compiles can split any text: {result.reason}"
        ends = accumulate(map(int, lengths))
        return [case.completion[start:end] for start, end in pairwise([0, *ends])]

    def _call_function(
        self,
        function: RunFunction,
        case: Case,
        *,
        left: float,
        named: Mapping[str, list[str]] | None = None,
        expected: int | None = None,
    ) -> CallResult:
        """Call a reward function in its process. If the process may have ended for an external reason, call the
        function again in a new process.

        `left` is the time limit in seconds, `named` are additional arguments by name, and `expected` is the number of
        values that the function must return. Raises ProcessEnded if the function itself ended the process, and
        WorkerLost after `MAX_ENDS` ends.
        """
        part = self._parts[_is_ours(function)]
        texts, ends = (case.prompt, case.completion, case.answer), list[str]()
        while True:
            limit = left if not ends else self._scoring.timeout_seconds
            try:
                process, index = part.place.ready(), part.functions.index(function)
                images = self._read_images(case) if process.takes(index, "images") else ()
                messages = case.chat if process.takes(index, "messages") else ()
                return process.call(
                    index,
                    *texts,
                    seconds=limit,
                    named=named or {},
                    expected=expected,
                    images=images,
                    messages=messages,
                )
            except ProcessEnded as end:
                part.place.close()
                if end.cause == "time":
                    end.args = (f"the reward returned no score within {self._scoring.timeout_seconds:g} s",)
                ends.append(end.cause)
                if end.num_repeats is not None and ends.count(end.cause) >= end.num_repeats:
                    raise
                if len(ends) == MAX_ENDS:
                    raise _score_failed(function, case, ends) from end

    def _read_images(self, case: Case) -> list[bytes]:
        """Return the encoded images of a completion, in the order of its digests."""
        if not case.images:
            return []
        assert self._media is not None, "cases with images need a media store"
        return [self._media.encoded(digest) for digest in case.images]


def check_rewards(scoring: ScoringConfig) -> None:
    """Raise BadInput if a reward function cannot be built or imported. If a name is misspelled, the message suggests
    the most similar one."""
    for rule in scoring.built_in_rules:
        build_reward(rule)
    targets = [rule for rule in scoring.rules if rule.brings_code]
    if targets:
        evaluator = Evaluator(scoring.model_copy(update={"rewards": tuple(targets)}))
        try:
            evaluator.start()
        finally:
            evaluator.close()


@contextmanager
def reference_checks(scoring: ScoringConfig) -> Iterator[list[tuple[str, ReferenceCheck]]]:
    """Yield a function for each reward that checks reference answers, with the name of the reward in messages. The
    function raises ValueError if the reward cannot use an answer."""
    checks: list[tuple[str, ReferenceCheck]] = [
        (rule.label, partial(build_reward(rule), "", "")) for rule in scoring.built_in_rules if rule.checks_references
    ]
    with ExitStack() as stack:
        for term, rule in scoring.checking_targets.items():
            evaluator = stack.enter_context(closing(Evaluator(scoring.model_copy(update={"rewards": (rule,)}))))
            checks.append((term, partial(_check_reference, evaluator)))
        yield checks


def _check_reference(evaluator: Evaluator, answer: str) -> None:
    [verdict] = evaluator.evaluate([Case("", "", answer, tokens=())])
    if verdict.error is not None:
        raise ValueError(verdict.error.partition(": ")[2])


def check_image_parameters(scoring: ScoringConfig) -> None:
    """Raise BadInput if the policy's completions are images, but a user's reward function has no parameter `images`.
    Call this only for policies that generate images."""
    targets = [rule for rule in scoring.rules if rule.brings_code]
    if not targets:
        return
    evaluator = Evaluator(scoring.model_copy(update={"rewards": tuple(targets)}))
    try:
        blind = evaluator.find_terms_without_images()
    finally:
        evaluator.close()
    if blind:
        raise BadInput(
            f"reward {blind[0]!r} must score the pictures that the policy generates, but its function does not "
            "receive them. Add a parameter `images: list[bytes]` to the function"
        )


def _score_failed(function: RunFunction, case: Case, ends: Sequence[str]) -> WorkerLost:
    """Return the error, with advice, for a completion whose scoring process ended repeatedly. `ends` contains the cause
    of each end."""
    times = f"{len(ends)} times in a row ({', '.join(ends)})"
    return WorkerLost(
        f"{function.where}: the process that scores {case.where} ended {times}, for an unknown reason, so there is no "
        "score. Check that the machine has enough memory (see the kernel's log) and that nothing kills the process. If "
        'the function itself ends the process, fix the function or set scoring.sandbox = "bubblewrap".'
    )


def _is_ours(function: RunFunction) -> bool:
    """Return whether a reward function is built into Rheostat, as opposed to a user's function."""
    return function.target.startswith(OURS)


def _build_cut_function(steps: Segmentation) -> RunFunction:
    """Return a reference to a function that splits completions into steps by the pattern in `steps`. The process that
    runs reward functions imports the function through this reference."""
    settings = {"settings": steps.model_dump(mode="json")}
    return RunFunction(f"{OURS}rules:load_segmentation", where="steps", options=settings, made=True)
