"""Bisection: the plan and the parts of a search for the difference between two runs that made one of them worse. Forks
of the worse run are trained in which some differences are undone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from rheostat.infra.config import Settings, changed_keys
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.store.runs import MAX_NAME, Run, open_run
from rheostat.infra.store.shards import read_shard
from rheostat.infra.store.tombstones import WHOLE_RUN, deleted_parts
from rheostat.models.config.promotion import HELDOUT, MIN_PROBLEMS
from rheostat.models.gate.comparison import PairedDifference, PairedScores, compare
from rheostat.tasks.config.run import RunConfig, parse_config
from rheostat.tasks.forks.bisect_inputs import (
    CodeFolders,
    absolute_settings,
    apply_harmless,
    check_complete,
    check_good_python,
    check_harmless,
    check_one_configuration,
    check_runs,
    find_code,
    find_good_run,
)
from rheostat.tasks.forks.causes import Candidate, find_candidates
from rheostat.tasks.forks.conflicts import IterationNotForkable, iterations_with_policy
from rheostat.tasks.forks.creation import PlannedFork, read_recorded_config, request_fork
from rheostat.tasks.forks.search import list_candidates, max_trials
from rheostat.tasks.forks.unlearning import check_remaining_prompts
from rheostat.tasks.promotion.evidence import read_answers
from rheostat.tasks.promotion.suites import Suite, policy_directory
from rheostat.tasks.run.keys import PROMPTS, StageKey, iteration_key
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.report.sections import ALPHA
from rheostat.tasks.views.runs import open_known_run

GOOD: Final = "good"
"""Suffix of the name of the run that evaluates the better policy: NAME.heldout.good."""
BAD: Final = "bad"
"""Suffix of the name of the run that evaluates the worse policy: NAME.heldout.bad."""


def _is_about_evaluation(override: str) -> bool:
    return override.strip().startswith("evaluation.")


class BisectRequest(Settings):
    """Arguments of a bisection."""

    good: str
    """Better run. If it is the name of a registry, the run of the champion from which the worse run started."""
    bad: str
    """Worse run."""
    name: str
    """Name of the bisection, with which the names of its runs begin."""
    store: str = "./runs"
    """Store that contains the runs."""
    overrides: tuple[str, ...] = ()
    """Overrides of settings that do not affect the results of training, such as `pools.workers=4`, or of settings of
    the evaluation, such as `evaluation.problems=500`."""
    good_code: Path | None = None
    """Folder with the user's code with which the better run was trained, or None for the folder of its job."""
    bad_code: Path | None = None
    """Folder with the user's code with which the worse run was trained, or None for the folder of its job."""
    good_python: Path | None = None
    """Python interpreter of an environment with the libraries of the better run and the present version of Rheostat.
    If set, library versions are a difference that forks can undo. If None, different versions are listed as not
    tested."""
    num_row_ranges: Annotated[int, Field(ge=1)] = 8
    """Number of ranges into which different training prompts are divided."""
    accept_change: bool = False
    """Whether existing forks continue even if reward code or library versions have changed."""


@dataclass(frozen=True)
class Bisection:
    """Bisection whose arguments have been checked."""

    request: BisectRequest
    good: Run
    bad: Run
    code: CodeFolders
    """Folders with the user's code of both runs."""
    iteration: int = 0
    """Iteration of the worse run at which the forks begin."""
    candidates: tuple[Candidate, ...] = ()
    """Differences that forks can undo."""
    untested: tuple[str, ...] = ()
    """Differences that cannot be undone."""

    def fork(self, number: int, undone: Sequence[int]) -> "TrialFork":
        """Return the request for a fork in which the candidates with the indices in `undone` are undone."""
        causes = [self.candidates[index] for index in undone]
        ours = [each for each in self.request.overrides if not _is_about_evaluation(each)]
        return TrialFork(
            store=self.request.store,
            point=f"{self.request.bad}@{self.iteration}",
            name=f"{self.request.name}.{fork_side(number)}",
            overrides=("report=false", *ours, *(override for cause in causes for override in cause.overrides)),
            excluded_rows=tuple(sorted(row for cause in causes for row in cause.rows)),
            accept_change=self.request.accept_change,
        )

    def check_undone(self, planned: PlannedFork, undone: Sequence[int]) -> None:
        """Raise BadInput if a planned fork differs from the better run in a setting that it should undo."""
        remaining = changed_keys(*self.good.settings_beside(planned.config))
        for override in (override for index in undone for override in self.candidates[index].overrides):
            key = override.partition("=")[0]
            if key != "iterations" and any(f"{each}.".startswith(f"{key}.") for each in remaining):
                raise BadInput(
                    f"fork {planned.config.name!r}: {key} cannot get its value in {self.good.name!r}, because another "
                    f"setting of {self.bad.name!r} determines it."
                )

    def code_folder(self, undone: Sequence[int]) -> Path:
        """Return the folder of the code with which a fork is trained."""
        return self.code.good if any(self.candidates[index].is_code for index in undone) else self.code.bad

    def python(self, undone: Sequence[int]) -> Path | None:
        """Return the Python interpreter that trains a fork, or None for the present one."""
        is_undone = any(self.candidates[index].is_libraries for index in undone)
        return self.request.good_python if is_undone else None

    def compare(self, baseline: str, other: str) -> PairedDifference:
        """Return the paired difference between two evaluated policies, `other` minus `baseline`. Both are suffixes of
        the names of evaluation runs, such as GOOD.

        Problems that only one of the two runs holds out, or with another answer, are left out, because they may be
        wrong, unless too few problems for a test remain. Raises BadInput if the problems have changed between the
        evaluations.
        """
        suite = judge_suite(self.request)
        answers = [read_answers(suite, side) for side in (baseline, other)]
        if answers[0].digest != answers[1].digest:
            raise BadInput(
                f"the held-out problems have changed between the evaluations {suite.run_name(baseline)} and "
                f"{suite.run_name(other)}. Restore the data files of {self.bad.name!r} and choose another name for the "
                "bisection."
            )
        term = suite.scoring.terms[0]
        sides = [each.scores[term] for each in answers]
        common = self._common_problems & sides[0].keys()
        if len(common) >= MIN_PROBLEMS:
            sides = [{name: scores for name, scores in side.items() if name in common} for side in sides]
        return compare(PairedScores.of(*sides), alpha=ALPHA, seed=0)

    @cached_property
    def _common_problems(self) -> frozenset[str]:
        """Ids of the held-out problems that both runs store with the same reference answer."""
        sides = []
        for run in (self.good, self.bad):
            manifest = run.find(PROMPTS["heldout"])
            if manifest is None or WHOLE_RUN in deleted_parts(run):
                return frozenset()
            shown = read_shard(run.store, manifest.shards[0], ["prompt_id", "answer", "columns"])
            sides.append({tuple(row.values()) for row in shown.to_pylist()})
        return frozenset(name for name, *_ in sides[0] & sides[1])


class BisectionPlan(Settings):
    """Description of a bisection before it begins."""

    name: str
    """Name of the bisection."""
    good: str
    """Name of the better run."""
    bad: str
    """Name of the worse run."""
    iteration: int
    """Iteration of the worse run at which the forks begin."""
    iterations: int
    """Last iteration of the forks."""
    candidates: tuple[Candidate, ...]
    """Differences that forks can undo."""
    untested: tuple[str, ...]
    """Differences that cannot be undone."""
    max_forks: int
    """Maximum number of trained forks without a budget: ⌈log2 n⌉ + 2 for n > 1 candidates, otherwise n."""
    worker_seconds: float
    """Estimated time for which workers will be reserved for this number of forks, in seconds."""
    price: float
    """Estimated cost of this number of forks, from the recorded prices of the worse run."""

    def lines(self) -> list[str]:
        """Describe the bisection as lines for the terminal."""
        price = f", price about {self.price:,.4f}" if self.price else ""
        iterations = format_count(self.iterations - self.iteration, "iteration")
        return [
            f"bisect   {self.bad} is compared with {self.good}. {format_count(len(self.candidates), 'difference')}:",
            *list_candidates(self.candidates, self.untested),
            f"trains   up to {format_count(self.max_forks, 'fork')} of {self.bad}@{self.iteration}, each {iterations}",
            f"costs    up to about {self.worker_seconds:,.0f} worker seconds{price} for the forks, and "
            f"{format_count(self.max_forks + 2, 'evaluation')}",
        ]


class BisectionStep(Settings):
    """Work of a bisection that one process does: train a fork, or evaluate policies, or both in this order."""

    request: BisectRequest
    fork: "TrialFork | None" = None
    """Fork to train."""
    evaluations: dict[str, str] = {}
    """Name of the run whose last policy is evaluated, by suffix of the name of the evaluation run."""


class TrialFork(Settings):
    """Arguments of one fork of a bisection."""

    store: str
    point: str
    """Worse run and last shared iteration, as RUN@N."""
    name: str
    """Name of the fork."""
    overrides: tuple[str, ...]
    excluded_rows: tuple[int, ...]
    """Row numbers of training prompts that the fork does not use."""
    accept_change: bool

    def plan(self) -> PlannedFork:
        """Check the fork, and return it. Raises BadInput if the fork is not possible, or if too few training prompts
        remain."""
        planned = request_fork(
            self.store,
            self.point,
            self.name,
            overrides=self.overrides,
            excluded_rows=self.excluded_rows,
        )
        if self.excluded_rows:
            parent = open_run(self.store, planned.fork.parent)
            check_remaining_prompts(parent, frozenset(self.excluded_rows), planned.config)
        return planned


def judge_suite(request: BisectRequest) -> Suite:
    """Return the evaluation with which all policies are compared: the held-out problems and the sampling of the worse
    run, and the first reward of the better run. Raises BadInput if this reward is a model that each run trains."""
    good, bad = open_run(request.store, request.good), open_run(request.store, request.bad)
    document = {**absolute_settings(bad, request.store), "iterations": 0, "name": request.name}
    config = apply_harmless({**document, "preferences": None, "dpo": None}, request.overrides, bad.name)
    rewards = parse_config(absolute_settings(good, request.store), source=f"run {good.name}", recorded=True).scoring
    first = rewards.rewards[0]
    hosted = rewards.hosted_rewards.get(rewards.terms[0])
    if hosted is not None and (hosted.model.begins_as_policy or hosted.is_trained):
        raise BadInput(
            f"the first reward of run {good.name!r}, {rewards.terms[0]}, is a model that each run trains, or copies "
            "from its policy, so it cannot compare the policies of several runs."
        )
    where = {"python": config.scoring.python, "sandbox": config.scoring.sandbox}
    scoring = rewards.model_copy(update={"rewards": (first,), **where})
    return Suite(HELDOUT, config.data, scoring, config.evaluation, config.rollout.sampling, config)


def evaluation_config(request: BisectRequest, side: str, name: str) -> RunConfig:
    """Return the configuration of the run that evaluates the last policy of the run `name`. `side` is the suffix of the
    name of the evaluation run."""
    run = open_run(request.store, name)
    config = read_recorded_config(run, request.store)
    directory = policy_directory(config, len(sealed_iterations(run)))
    return judge_suite(request).config(side, config.policy.with_path(Path(directory)))


def fork_side(number: int) -> str:
    """Return the end of the name of the fork with this number, counted from 1."""
    return f"fork-{number}"


def request_bisection(request: BisectRequest) -> Bisection:
    """Check the arguments of a bisection, and list the differences of the two runs. Nothing is written.

    The returned bisection has a request in which the better run is named and the store has an absolute path. Raises
    BadInput if a run cannot be forked or compared, if the code of a run is not found, or if an override affects the
    results of training.
    """
    store = request.store if "://" in request.store else str(Path(request.store).expanduser().resolve())
    good_name = find_good_run(store, request.good, request.bad)
    python = None if request.good_python is None else request.good_python.expanduser().absolute()
    request = request.model_copy(update={"good": good_name, "store": store, "good_python": python})
    good, bad = open_known_run(store, request.good), open_known_run(store, request.bad)
    check_runs(good, bad)
    longest = len(f"{request.name}.{HELDOUT}.{fork_side(99)}")
    if longest > MAX_NAME:
        raise BadInput(
            f"the name {request.name!r} is too long, because names of runs begin with it. Choose a name with at most "
            f"{MAX_NAME - longest + len(request.name)} characters."
        )
    code = find_code(good, bad, good_folder=request.good_code, bad_folder=request.bad_code)
    configs = read_recorded_config(good, store), read_recorded_config(bad, store)
    check_complete(good, configs[0])
    check_complete(bad, configs[1])
    check_harmless(bad, configs[1], [each for each in request.overrides if not _is_about_evaluation(each)])
    if python is not None:
        check_good_python(python, good, *configs)
    for side, name in ((GOOD, good.name), (BAD, bad.name)):
        evaluation_config(request, side, name)
    bisection = _choose_start(Bisection(request, good, bad, code))
    check_one_configuration(bad, bisection.iteration)
    found = find_candidates(
        good,
        bad,
        configs,
        iteration=bisection.iteration,
        num_row_ranges=request.num_row_ranges,
        has_good_python=python is not None,
    )
    return _without_impossible(replace(bisection, candidates=found.candidates, untested=found.untested))


def _choose_start(bisection: Bisection) -> Bisection:
    """Return the bisection with the iteration at which the forks begin: the last one that both runs share, that is not
    the last one of either run, and at which the worse run can be forked."""
    good, bad, refusal = bisection.good, bisection.bad, None
    shared = 0
    for number in range(1, min(len(sealed_iterations(run)) for run in (good, bad))):
        seals = [run.require(StageKey.of(iteration_key(number), "seal")) for run in (good, bad)]
        if seals[0].digest != seals[1].digest:
            break
        shared = number
    for number in iterations_with_policy(bad, bisection.request.name, shared):
        chosen = replace(bisection, iteration=number)
        try:
            chosen.fork(0, ()).plan()
        except IterationNotForkable as error:
            refusal = refusal or error
        else:
            return chosen
    raise refusal or BadInput(f"run {bad.name!r} cannot be forked, because its initial policy is not stored.")


def _without_impossible(bisection: Bisection) -> Bisection:
    """Return the bisection without the candidates that a fork cannot undo. They are listed as untested, with the
    reason."""
    possible, untested = list[Candidate](), [*bisection.untested]
    for index, candidate in enumerate(bisection.candidates):
        try:
            bisection.check_undone(bisection.fork(0, (index,)).plan(), (index,))
        except BadInput as error:
            untested.append(f"{candidate.text} ({error})")
        else:
            possible.append(candidate)
    return replace(bisection, candidates=tuple(possible), untested=tuple(untested))


def plan_bisection(request: BisectRequest) -> tuple[BisectionPlan, RunConfig]:
    """Check a bisection, and return its plan and the configuration of one of its forks. Nothing is written. See
    `request_bisection` for errors."""
    bisection = request_bisection(request)
    planned, count = bisection.fork(0, ()).plan(), max_trials(len(bisection.candidates))
    plan = BisectionPlan(
        name=request.name,
        good=bisection.request.good,
        bad=request.bad,
        iteration=bisection.iteration,
        iterations=planned.plan.iterations,
        candidates=bisection.candidates,
        untested=bisection.untested,
        max_forks=count,
        worker_seconds=count * planned.plan.worker_seconds,
        price=count * planned.plan.price,
    )
    return plan, planned.config
