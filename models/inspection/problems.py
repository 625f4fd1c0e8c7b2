"""Checks of a run's problems: their numbers, repetitions across splits, prompts and images."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Final

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput, InputErrors
from rheostat.infra.variants import check_implementation
from rheostat.models.config.checks import CheckResult
from rheostat.models.config.data import DataConfig, DataSource
from rheostat.models.config.promotion import SuiteCheck
from rheostat.models.config.training import WarmupConfig
from rheostat.models.data.curriculum import max_prompts
from rheostat.models.data.examples import picture_examples, warmup_examples
from rheostat.models.data.problems import Problem, load_problems
from rheostat.models.data.reading import report_reading
from rheostat.models.data.unread_columns import list_column_notes
from rheostat.models.gate.contamination import contamination
from rheostat.models.inspection.facts import InputFacts, Inputs
from rheostat.models.inspection.images import check_images, check_warmup_images
from rheostat.models.vision.color_conversion import count_conversions

PROMPTS: Final = "rollout.prompts"
EVALUATED: Final = "evaluation.problems"


def check_source(data: DataSource, facts: InputFacts, where: str) -> None:
    """Raise BadInput if the function that reads or generates the problems cannot be imported or called."""
    check_implementation(data, "data", "split", "seed", where=where)


def check_problems(data: DataConfig, facts: InputFacts, where: str) -> CheckResult:
    """Read the problems and count them. Raises BadInput if there are too few, or with all held-out problems that are
    training problems too."""
    counts = count_problems(data, facts.train, facts.heldout)
    reading = report_reading(data, "train", "heldout")
    _require_enough(facts.inputs, counts)
    trained = () if data.is_evaluation_only else facts.train
    training_problems, input_errors = {problem.identity for problem in trained}, InputErrors()
    for problem in facts.heldout:
        with input_errors.collect(problem.source):
            if problem.identity in training_problems:
                raise BadInput(
                    f"{problem.source}: this held-out problem is also a training problem. Remove it from one split."
                )
    input_errors.check()
    dropped = {f"dropped/{reason}": number for reason, number in reading.dropped.items()}
    return CheckResult(facts={**counts, **dropped}, notes=reading.notes)


def check_prompts(data: DataConfig, facts: InputFacts, where: str) -> CheckResult:
    """Check the images and the prompts of the problems with the policy's image processor and tokenizer. Return the
    numbers and lengths of the prompts, and remarks on their texts."""
    from rheostat.models.inspection.texts import list_text_notes

    problems, examples = facts.problems, facts.imitated
    check_images(problems, facts.processor, allows_missing=data.image_version == 1)
    train, heldout = facts.prompts
    counts = count_problems(data, [each for each, _ in train], [each for each, _ in heldout])
    _require_enough(facts.inputs, counts)
    notes = list_text_notes(
        problems, facts.tokenizer, rules=data.text_rules, processor=facts.processor, examples=examples
    )
    return CheckResult(
        facts={
            **counts,
            "too_long": len(problems) - len(train) - len(heldout),
            **({"worked_answers": sum(each.worked is not None for each in examples)} if examples else {}),
            "mean_prompt_tokens": fmean(len(prompt.input) for _, prompt in train),
            "longest_prompt_tokens": facts.longest_prompt,
        },
        notes=(*notes, *dict.fromkeys(list_column_notes(data, problems))),
    )


def check_examples(warmup: WarmupConfig, facts: InputFacts, where: str) -> CheckResult:
    """Check that the warm-up has examples to train on. For a text-to-image policy, return the number of distinct images
    and how many of them must be converted. Raises BadInput if an image has another size than the policy generates."""
    inputs, side = facts.inputs, facts.inputs.policy.picture_side
    if facts.imitated:
        warmup_examples(inputs.data, warmup.model_copy(update={"steps": 1}), inputs.seed)
    if side is None:
        return CheckResult()
    examples = [*dict.fromkeys(picture_examples(inputs.data, warmup, inputs.seed))]
    check_warmup_images(examples, side=side)
    counts = count_conversions(picture for _, picture in examples)
    return CheckResult(facts={f"warm-up images/{kind}": number for kind, number in counts.items()})


def check_suite(against: SuiteCheck, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a retrain would train on problems of its evaluation suite, or if the champion (the policy from
    which it starts) has another tokenizer than the configured policy."""
    from rheostat.models.inspection.other_models import check_same_tokens

    inputs = facts.inputs
    texts = {problem.source: problem.identity for problem in facts.heldout[: inputs.evaluation.problems]}
    overlap = contamination(texts, (problem.identity for problem in load_problems(against.data, "train", inputs.seed)))
    if overlap.share > against.max_contaminated:
        cap = f"{overlap.share:.1%} is above promotion.max_contaminated {against.max_contaminated:.1%}"
        raise BadInput(f"suite {against.suite!r}: {overlap.text()}; {cap}")
    if against.policy is not None:
        check_same_tokens(against.policy, inputs.policy)


def count_problems(data: DataConfig, train: Sequence[Problem], heldout: Sequence[Problem]) -> dict[str, float]:
    """Count the training and held-out problems, and the maximum number of prompts in an iteration. For a mixture of
    data sources, `scarce_part` is the source that limits this maximum. `images/KIND` is the number of images that were
    converted for this reason.

    `near_twins` counts the held-out problems that differ from a training problem only in letter case, white space or
    Unicode normalization.
    """
    counts: dict[str, float] = {"train_problems": len(train), "heldout_problems": len(heldout)}
    counts["repeated_problems"] = len(train) - len({problem.identity for problem in train})
    training_keys = {problem.split_key for problem in train}
    counts["near_twins"] = sum(problem.split_key in training_keys for problem in heldout)
    images = (image for problem in (*train, *heldout) for image in problem.images)
    counts |= {f"images/{kind}": number for kind, number in count_conversions(images).items()}
    if not data.weights:
        return counts | {"max_prompts": len(train)}
    parts = Counter(problem.part for problem in train)
    limit, part = max_prompts([parts[number] for number in range(len(data.weights))], data.weights)
    return counts | {"max_prompts": limit, "scarce_part": part, "scarce_problems": parts[part]}


def _require_enough(inputs: Inputs, counts: Mapping[str, float]) -> None:
    prompts, evaluated = inputs.rollout.prompts, inputs.evaluation.problems
    check_sizes(inputs.data, counts, prompts=prompts, evaluated=evaluated, giving_way=inputs.giving_way)


def check_sizes(
    data: DataConfig, counts: Mapping[str, float], *, prompts: int, evaluated: int, giving_way: Collection[str]
) -> None:
    """Raise BadInput if there are fewer problems than a run needs: `prompts` training problems per iteration and
    `evaluated` held-out problems. For a key in `giving_way`, whose default can be lowered, one problem is enough."""
    max_prompts, heldout = int(counts["max_prompts"]), int(counts["heldout_problems"])
    if prompts > max_prompts and not (max_prompts and PROMPTS in giving_way):
        if "scarce_part" not in counts:
            raise BadInput(
                f"{PROMPTS} is {prompts}, but the data has only {format_count(max_prompts, 'training problem')}, and "
                f"an iteration uses each problem at most once. Lower {PROMPTS} to at most {max_prompts}, or add "
                "problems."
            )
        part, have = int(counts["scarce_part"]), counts["scarce_problems"]
        share = data.weights[part] / sum(data.weights)
        raise BadInput(
            f"data.sources[{part}]: the weight of this source requires {share * prompts:.1f} problems in each "
            f"iteration ({PROMPTS} is {prompts}), but the source has only {have:.0f}. Lower its weight, or set "
            f"{PROMPTS} to at most {max_prompts}."
        )
    if evaluated > heldout and EVALUATED not in giving_way:
        raise BadInput(
            f"{EVALUATED} is {evaluated}, but only {format_count(heldout, 'problem is', 'problems are')} held out. Set "
            f"{EVALUATED}={heldout}, or add held-out problems."
        )
