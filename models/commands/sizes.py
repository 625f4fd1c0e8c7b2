"""Numbers of problems, and the check whether they are sufficient for a run."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.data import DataConfig
from rheostat.models.config.training import SupervisedWarmup
from rheostat.models.data.curriculum import max_prompts
from rheostat.models.data.examples import picture_examples
from rheostat.models.data.problems import Problem
from rheostat.models.inspection.images import check_warmup_images
from rheostat.models.vision.color_conversion import count_conversions

PROMPTS: Final = "rollout.prompts"
EVALUATED: Final = "evaluation.problems"


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


def count_warmup_images(data: DataConfig, warmup: SupervisedWarmup, seed: int, *, side: int) -> dict[str, float]:
    """Count the distinct images on which the warm-up of a text-to-image policy trains, and how many of them must be
    converted. Raises BadInput if an image has another size than `side` x `side` pixels."""
    examples = [*dict.fromkeys(picture_examples(data, warmup, seed))]
    check_warmup_images(examples, side=side)
    counts = count_conversions(picture for _, picture in examples)
    return {f"warm-up images/{kind}": number for kind, number in counts.items()}


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
