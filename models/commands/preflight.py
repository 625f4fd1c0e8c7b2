"""Check all inputs of a run before anything is written: `python -m rheostat.models.commands.preflight run`.

`plan` does the same without writing to the cache, and `scoring` checks the rewards alone. Reads the configuration as
JSON on stdin. Prints a line `{"checking": "data"}` for each part of the configuration, and at the end the line
`{"ok": true, "error": "", "is_down": false, "facts": {…}, "notes": […]}`, or `ok` false with the error in one line and
exit code 2; `is_down` means that an endpoint did not answer. Flows may not import code of models.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rheostat.infra.config import Settings
from rheostat.infra.errors import BadInput, EndpointDown
from rheostat.infra.runner import die_with_parent
from rheostat.models.commands.preflight_cache import build_key, checks_directory, find_or_compute
from rheostat.models.config.checks import CheckResult, Stage, find_checks, load_check
from rheostat.models.config.conflicts import slot_engines
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import RolloutConfig
from rheostat.models.inspection.facts import InputFacts, Inputs
from rheostat.models.modeling.unread_weights import collect_unread_weights

Part = tuple[str, Settings]
"""Part of the configuration that may bring checks, after its name in messages."""
CACHED: Final = ("policy", "models")
"""Stages that read the files of models. Importing transformers for them takes a second, so that the stages before them
report errors sooner."""


def check(
    inputs: Inputs, *, cache: Path | None = None, report: Callable[[str], None] = lambda where: None
) -> CheckResult:
    """Check all inputs of a run. Return counts, lengths, and memory estimates in bytes per worker. With `cache`, facts
    about models from an earlier check are reused. `report` is called with the name of each part before the check of the
    part. Raises BadInput if an input is invalid."""
    facts, parts = InputFacts(inputs), _list_parts(inputs)
    read = _run_checks(parts, ("settings", "problems"), facts, report)

    def find() -> CheckResult:
        with collect_unread_weights() as unread:
            result = _run_checks(parts, CACHED, facts, report)
        return CheckResult(facts=result.facts, notes=(*unread, *result.notes))

    if cache is None or not _is_repeatable(inputs, parts):
        result = find()
    else:
        image_digests = [problem.digests for problem in facts.problems]
        result = find_or_compute(cache, lambda: build_key(inputs, facts.train, facts.heldout, image_digests), find)
    # Never cached, because another model may answer at an endpoint by now. The machine is last, so that nobody installs
    # vLLM for a model that it cannot serve.
    _run_checks(parts, ("endpoints", "machine"), facts, report)
    return CheckResult(facts=read.facts | result.facts, notes=(*read.notes, *result.notes))


def check_scoring(inputs: Inputs, *, report: Callable[[str], None] = lambda where: None) -> CheckResult:
    """Check only the reward settings, before stored rollouts are scored again. The data is read only if workers host a
    model that computes a reward."""
    parts = [*_list_rewards(inputs.scoring), *_list_engines(None, inputs.scoring)]
    return _run_checks(parts, ("settings", "models", "endpoints", "machine"), InputFacts(inputs), report)


def _run_checks(
    parts: Sequence[Part], stages: Sequence[Stage], facts: InputFacts, report: Callable[[str], None]
) -> CheckResult:
    """Run the checks of all parts, stage by stage, and return their findings together."""
    numbers, notes = dict[str, float](), list[str]()
    for stage in stages:
        for where, part in parts:
            for path in find_checks(part, stage):
                report(where)
                if (found := load_check(path, where=where)(part, facts, where)) is not None:
                    numbers |= found.facts
                    facts.numbers |= found.facts
                    notes += found.notes
    return CheckResult(facts=numbers, notes=tuple(notes))


def _list_parts(inputs: Inputs) -> list[Part]:
    """Return the parts of a configuration, in the order in which each stage checks them: cheap checks before dear ones,
    and checks after the ones whose numbers they use."""
    rollout, algorithm = inputs.rollout, inputs.algorithm
    dialogue = None if rollout.environment is None else rollout.environment.dialogue
    parts = [
        ("update.loss", inputs.update.loss),
        *_list_engines(rollout, inputs.scoring),
        ("policy", inputs.policy),
        ("rollout.denoising", rollout.denoising),
        *((f"tracking {tracker.label!r}", tracker) for tracker in inputs.tracking),
        ("data", inputs.data),
        ("rollout.environment", rollout.environment),
        ("rollout", rollout),
        ("warmup", inputs.warmup),
        ("update", inputs.update),
        *_list_rewards(inputs.scoring),
        ("algorithm", algorithm),
        *algorithm.all_teachers.items(),
        ("preferences", inputs.preferences),
        ("rollout.environment.model", None if dialogue is None else dialogue.model),
        ("promotion.suites", inputs.checked),
    ]
    return [(where, part) for where, part in parts if part is not None]


def _list_rewards(scoring: ScoringConfig) -> list[Part]:
    return [("scoring", scoring), *((f"reward {reward.term!r}", reward) for reward in scoring.rewards)]


def _list_engines(rollout: RolloutConfig | None, scoring: ScoringConfig) -> list[Part]:
    return [(name, engine) for name, engine, _ in slot_engines(rollout, scoring)]


def _is_repeatable(inputs: Inputs, parts: Sequence[Part]) -> bool:
    """Return whether the result of a check may be cached, because no environment, user's class or teacher endpoint
    affects it."""
    asks = any(teacher.endpoint is not None for teacher in inputs.algorithm.all_teachers.values())
    engines = (engine for _, engine, _ in slot_engines(inputs.rollout, inputs.scoring))
    sources = (inputs.policy, *inputs.scoring.judge_shapes.values())
    paths = (path for _, part in parts for stage in CACHED for path in find_checks(part, stage))
    return (
        not asks
        and inputs.rollout.environment is None
        and all(part.ships_with("models") for part in (inputs.algorithm, inputs.update.loss, *engines, *sources))
        and all(path.startswith("rheostat.") for path in paths)
    )


def main() -> int:
    """Run the preflight command: read a configuration from stdin and write lines with the progress and the result to
    stdout. Returns the exit code."""
    die_with_parent(os.getppid())
    answer = os.fdopen(os.dup(1), "w", buffering=1)

    def report(where: str) -> None:
        answer.write(json.dumps({"checking": where}) + "\n")

    with contextlib.redirect_stdout(sys.stderr):  # rewards and libraries may print; stdout must contain only the answer
        inputs = Inputs.model_validate_json(sys.stdin.read())
        error, is_down, result = "", False, CheckResult()
        try:
            match sys.argv[1:]:
                case ["scoring"]:
                    result = check_scoring(inputs, report=report)
                case ["plan"]:  # writes nothing at all
                    result = check(inputs, cache=None, report=report)
                case _:
                    result = check(inputs, cache=checks_directory(), report=report)
        except (BadInput, EndpointDown) as found:
            error, is_down = " ".join(str(found).split()), isinstance(found, EndpointDown)
    with answer:
        verdict = {"ok": not error, "error": error, "is_down": is_down, **result.model_dump()}
        answer.write(json.dumps(verdict) + "\n")
    return 2 if error else 0


if __name__ == "__main__":
    sys.exit(main())
