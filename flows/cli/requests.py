"""Requests for new scores (rescore) or new advantages (recredit) from a run's stored rollouts: parsing, checks,
execution."""

import asyncio
import hashlib
import json
import logging
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, JsonValue, ValidationError

from rheostat.flows.cli.prefect_api import prefect_api, run_flow
from rheostat.infra.config import PoolsConfig, read_recorded
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import register_target_folder
from rheostat.infra.store.dependencies import check_dependencies, recorded_config
from rheostat.infra.store.inputs import place_texts
from rheostat.infra.store.runs import Run, open_run
from rheostat.infra.user_files import read_text_file
from rheostat.infra.validation_errors import explain, nearest
from rheostat.models.algorithms.advantages import required_models
from rheostat.models.config.algorithms import Algorithm
from rheostat.models.config.conflicts import JobParts, find_conflicts
from rheostat.models.config.endpoints import MAX_PAUSE_SECONDS
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.rewards import ScoringConfig
from rheostat.tasks.config.run import RunConfig, override_config
from rheostat.tasks.run.batch import check_rollouts_kept, iterations_with_rollouts
from rheostat.tasks.run.dependencies import recredit_dependencies, rescoring_dependencies
from rheostat.tasks.run.hub_inputs import with_hub_commits
from rheostat.tasks.run.iteration import carry_over_before
from rheostat.tasks.run.keys import StageKey
from rheostat.tasks.run.preflight import mark_as_checked, preflight
from rheostat.tasks.run.references import recorded_rule
from rheostat.tasks.run.rescorings import (
    DerivedResult,
    Recredit,
    RecreditTerms,
    Rescoring,
    RescoringTerms,
    check_terms,
    recorded_terms,
    rescoring_terms,
    sealed_numbers,
    with_rescoring_commits,
)
from rheostat.tasks.views.metrics import sealed_iterations
from rheostat.tasks.views.runs import known_rescoring, open_known_run

M = TypeVar("M", bound=BaseModel)

logger = logging.getLogger(__name__)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def request_rescoring(
    store: str,
    run_name: str,
    *,
    rewards: str,
    name: str | None,
    iterations: str | None,
    overrides: Sequence[str],
) -> Rescoring:
    """Build the request that computes new scores for a stored run, from the arguments of `rheostat rescore`. Raises
    BadInput before anything is written if an argument is not valid."""
    run = open_known_run(store, run_name)
    terms = parse_part(rewards, RescoringTerms, part="scoring", what="--rewards")
    chosen = check_name(name) if name is not None else f"{terms.scoring.terms[0]}-{digest_of(terms)}"
    numbers = parse_iterations(iterations, run)
    config = stored_configuration(run, store, overrides, scoring=terms.scoring)
    slots, workers = (
        sum(reward.slots for reward in terms.scoring.hosted_rewards.values()),
        config.pools.workers.min_slots,
    )
    if slots > workers:
        raise BadInput(
            f"pools.workers is {workers}, but the new reward models need at least "
            f"{format_count(slots, 'worker slot')}. Raise it, such as with pools.workers={slots}."
        )
    for term in terms.scoring.trained_reward_models:
        if config.preferences is None:
            raise BadInput(
                f"Reward {term!r} has model.kind = 'trained' and is trained on preference pairs, but the run has no "
                "[preferences]. Use another model.kind."
            )
    derived = DerivedResult("rescore", chosen)
    check_terms(run, derived, terms)
    check_dependencies(run, rescoring_dependencies(terms.scoring), prefix=derived.prefix)
    return Rescoring(config=config, name=chosen, iterations=numbers)


def request_recredit(
    store: str,
    run_name: str,
    *,
    algorithm: str,
    scores: str | None,
    name: str | None,
    iterations: str | None,
    overrides: Sequence[str],
) -> Recredit:
    """Build the request that computes new advantages for a stored run, from the arguments of `rheostat recredit`.
    Raises BadInput before anything is written if an argument is not valid."""
    run = open_known_run(store, run_name)
    is_kind = re.fullmatch(r"[a-z_]+", algorithm) is not None and not Path(algorithm).is_file()
    table = f"kind = {json.dumps(algorithm)}" if is_kind else algorithm
    terms = parse_part(table, RecreditTerms, part="algorithm", what="--algorithm")
    terms = terms.model_copy(update={"scores": scores})
    short = terms.algorithm.label.rpartition(":")[2].lower()
    chosen = check_name(name) if name is not None else f"{short}-{digest_of(terms)}"
    numbers = parse_iterations(iterations, run)
    scoring = _read_scoring(run, scores)
    config = stored_configuration(run, store, overrides, scoring=scoring)
    config = config.model_copy(update={"algorithm": terms.algorithm})
    for reason in find_recredit_conflicts(run, terms, config, numbers):
        raise BadInput(f"recredit of run {run.name!r}: {reason}")
    derived = DerivedResult("recredit", chosen)
    check_terms(run, derived, terms)
    check_dependencies(run, recredit_dependencies(terms.algorithm), prefix=derived.prefix)
    return Recredit(config=config, name=chosen, scores=scores, iterations=numbers)


def find_recredit_conflicts(run: Run, terms: RecreditTerms, config: RunConfig, numbers: Sequence[int]) -> Iterator[str]:
    """Yield the reasons why an algorithm cannot compute new advantages for the stored rollouts of a run, such as
    missing values of a critic. `terms` describe the algorithm, `config` is the configuration with it, and `numbers` are
    the iterations. Yield nothing if the algorithm can be used."""
    # There is no update, so its settings are irrelevant.
    yield from find_conflicts(
        JobParts(
            algorithm=terms.algorithm,
            update=UpdateConfig(),
            rollout=config.rollout,
            scoring=config.scoring,
            pools=config.pools,
            iterations=0,
        )
    )
    terms = with_hub_commits(terms, run)
    own, needs, has = (
        recorded_terms(run).algorithm,
        required_models(terms.algorithm),
        required_models(recorded_terms(run).algorithm),
    )
    kl = terms.algorithm.reward_kl
    wanting = {
        "log-probs of the initial policy (algorithm.kl)": needs.reference and not has.reference,
        "log-probs of the reference with these resets (algorithm.kl)": kl is not None
        and has.reference
        and any(recorded_rule(run, number) != kl.rule for number in numbers),
        "values of a critic": needs.critic and not has.critic,
        "log-probs of this teacher (algorithm.distillation)": needs.teacher
        and _teachers_of(own) != _teachers_of(terms.algorithm),
        "this number of a teacher's most probable tokens (algorithm.distillation.top_k)": terms.algorithm.teacher_top_k
        not in (0, own.teacher_top_k),
    }
    for what, is_wanting in wanting.items():
        if is_wanting:
            need = f"{terms.algorithm.label} needs {what} for every token"
            yield f"{need}, but the run was trained with {own.label} and has not stored them. Use another algorithm."
    if terms.scores is not None:
        yield from _missing_scores(run, terms.scores, numbers)


def _teachers_of(algorithm: Algorithm) -> tuple[object, ...]:
    """Return the settings on which the stored log-probs of teachers depend. Empty if there is no teacher."""
    distillation = algorithm.distillation
    return () if distillation is None else (distillation.teacher, distillation.specialists)


def _missing_scores(run: Run, scores: str, numbers: Sequence[int]) -> Iterator[str]:
    derived = DerivedResult("rescore", scores)
    for number in numbers:
        before = {StageKey.parse(groups.scores).iteration for groups in carry_over_before(run, number).leftover_groups}
        for needed in sorted({number, *before} - {*sealed_numbers(run, derived)}):
            also = "" if needed == number else f", whose surplus groups iteration {number} uses"
            yield (
                f"rescoring {scores!r} has no scores of iteration {needed}{also}. Rescore this iteration first with "
                "`rheostat rescore`."
            )


def _read_scoring(run: Run, scores: str | None) -> ScoringConfig:
    """Return the rewards that produced the rescoring named `scores`. If `scores` is None, return the rewards with
    which the run was trained."""
    if scores is None:
        return read_recorded(ScoringConfig, recorded_config(run)["scoring"])
    known_rescoring(run, scores)
    terms = rescoring_terms(run, scores)
    assert terms is not None, "a known rescoring has its terms"
    return terms.scoring


def stored_configuration(run: Run, store: str, overrides: Sequence[str], *, scoring: ScoringConfig) -> RunConfig:
    """Return the configuration of a stored run with other rewards (`scoring`), for computing new scores or advantages.
    Raises BadInput if an override is not a setting in [pools]."""
    for override in overrides:
        if not override.startswith("pools."):
            raise BadInput(
                f"The override {override!r} is not allowed, because the other settings of a stored run cannot be "
                "changed. Override only keys of pools."
            )
    recorded = recorded_config(run)
    own_scoring, recorded_pools = read_recorded(ScoringConfig, recorded["scoring"]), recorded["pools"]
    assert isinstance(recorded_pools, dict), "a run's identity has its pools"
    pools = {**recorded_pools, **pools_for(own_scoring, scoring)}
    document = {**recorded, "name": run.name, "store": store, "pools": pools}
    document["placement"] = {"kind": "colocated"}
    config = override_config(document, overrides, source=f"run {run.name}", recorded=True)
    dynamic = config.rollout.dynamic
    if dynamic is not None and dynamic.metric not in scoring.terms:
        dynamic = dynamic.model_copy(update={"metric": None})
    rollout = config.rollout.model_copy(update={"dynamic": dynamic})
    return config.model_copy(update={"scoring": scoring, "rollout": rollout})


def pools_for(*scorings: ScoringConfig) -> dict[str, JsonValue]:
    """Return values for the [pools] table that suffice for these rewards: the number of worker slots, and a stall time
    that is long enough for slow endpoints. Defaults are the minimum, because a run's stored configuration omits these
    settings."""
    defaults, max_seconds = PoolsConfig(), 0.0
    slots = [sum(reward.slots for reward in scoring.hosted_rewards.values()) for scoring in scorings]
    for reward in (reward for scoring in scorings for reward in scoring.model_rewards.values()):
        if reward.endpoint is not None:
            max_seconds = max(max_seconds, reward.endpoint.timeout_seconds + MAX_PAUSE_SECONDS + 1)
    return {"workers": max(defaults.workers.max, *slots), "stall_seconds": max(defaults.stall_seconds, max_seconds)}


def parse_part(text: str, model: type[M], *, part: str, what: str) -> M:
    """Parse one table of a configuration. `text` is the path of a TOML file that contains the table, or the table's
    keys as inline TOML. `part` is the name of the table, and `what` is the command-line option for error messages.

    Raises BadInput if the file is missing or the text is not valid.
    """
    path = Path(text)
    inline = "=" in text and not path.is_file()
    if not inline and not path.exists():
        raise BadInput(f'{what} {text!r} is neither an existing TOML file nor inline TOML such as kind="grpo".')
    try:
        document: dict[str, object] = tomllib.loads(text if inline else read_text_file(path, label=f"{what} {text!r}"))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{what} {text!r} is not valid TOML: {error}") from None
    source = what if inline else f"{what} {text}"
    document = {key: place_texts(value, Path.cwd() if inline else path.parent) for key, value in document.items()}
    if not inline:
        register_target_folder(path.parent)
    return parse_model(_select_table(document, model, part, source), model, source=source)


def _select_table(document: Mapping[str, object], model: type[BaseModel], part: str, source: str) -> dict[str, object]:
    """Return only the table `part` of a TOML document, as {part: table}. The document is a whole configuration, or
    contains the keys of this table only. `source` is the name of the document in error messages."""
    if part in document:
        return {part: document[part]}
    whole = set(document) & set(RunConfig.model_fields)
    if not document or whole:
        raise BadInput(
            f"{source} must contain a table [{part}], but it contains only: "
            f"{', '.join(document) or 'nothing'}{nearest(part, [*document])}"
        )
    return {part: dict(document)}


def parse_model(document: Mapping[str, object], model: type[M], *, source: str) -> M:
    """Validate a TOML document with a settings class. Raises BadInput with a one-line description of the problem.
    `source` is the name of the document in this message."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{source}: {explain(error, model)}") from None


def parse_iterations(text: str | None, run: Run) -> tuple[int, ...]:
    """Parse a list of iterations such as `3`, `3-7` or `1,3-5`, and return their numbers. None selects all finished
    iterations whose rollouts still exist.

    Raises BadInput for numbers that are not sealed, and for other texts.
    """
    sealed = len(sealed_iterations(run))
    if not sealed:
        raise BadInput(f"Run {run.name!r} has no completed iteration yet. Wait until its first iteration ends.")
    if text is None:
        return tuple(iterations_with_rollouts(run, range(1, sealed + 1)))
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise BadInput(
                f"--iterations {text!r} must be numbers and ranges such as 3, 3-7 or 1,3-5, found {part.strip()!r}"
            )
        if first < 1 or last > sealed:
            raise BadInput(
                f"--iterations {text!r}: the completed iterations of run {run.name!r} are 1 to {sealed}. Choose some "
                "of them."
            )
        numbers.update(range(first, last + 1))
    check_rollouts_kept(run, sorted(numbers))
    return tuple(sorted(numbers))


def check_name(name: str) -> str:
    """Return the name of a rescoring or recredit unchanged if it is valid. Raises BadInput if it contains characters
    that are not allowed in the keys of stored results."""
    if not NAME.fullmatch(name) or ".." in name:
        raise BadInput(
            f"--as {name!r} is not a valid name. Use at most 64 characters (a-z 0-9 . _ -) without '..', starting "
            "with a letter or digit."
        )
    return name


def digest_of(terms: BaseModel) -> str:
    """Return 8 hexadecimal digits of a hash of the rewards or algorithm. They are the last part of the default name of
    a rescoring or recredit."""
    document: JsonValue = terms.model_dump(mode="json")
    return hashlib.blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=4).hexdigest()


def rescore_here(request: Rescoring) -> None:
    """Run the flow that computes the requested new scores, in this process. Iterations that already have these scores
    are skipped. Raises BadInput before anything is written or started if an input is invalid."""
    derived = DerivedResult("rescore", request.name)
    if _has_remaining(request, derived):
        asyncio.run(preflight(with_rescoring_commits(request.config, derived), part="scoring"))
        with mark_as_checked(), _open_prefect(request, derived):
            from rheostat.flows.rescoring import rescore

            run_flow(rescore(request))


def recredit_here(request: Recredit) -> None:
    """Run the flow that computes the requested new advantages, in this process. Iterations that already have them are
    skipped. Raises BadInput before anything is written or started if an input is invalid."""
    derived = DerivedResult("recredit", request.name)
    if _has_remaining(request, derived):
        with _open_prefect(request, derived):
            from rheostat.flows.rescoring import recredit

            run_flow(recredit(request))


def _has_remaining(request: Rescoring | Recredit, derived: DerivedResult) -> bool:
    """Return whether any requested iteration has not been rescored or recredited yet. Raises RunLocked if there is
    such an iteration but another process has locked the run."""
    run = open_run(request.config.store, request.config.name)
    if set(request.iterations) <= {*sealed_numbers(run, derived)}:
        return False
    run.check_unlocked()
    return True


@contextmanager
def _open_prefect(request: Rescoring | Recredit, derived: DerivedResult) -> Iterator[None]:
    with prefect_api() as url:
        logger.info("%s of run %s; Prefect's UI: %s", derived.label, request.config.name, url.removesuffix("/api"))
        yield
