"""Whole iterations of a vision-language policy compared with TRL's `GRPOTrainer`, and the share of its vision tower.

This is like `bench.trl`, with an image before every prompt and Idefics3's architecture, so every completion's prompt
contains the tokens of one image. The policy is random and generates EOS as rarely as any other token, so that nearly
all completions have the maximum length. The tower's share is measured in CPU seconds on one thread: one shard is
generated again and one iteration is trained again, with a timer around the tower's forward and backward passes.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.idefics3.modeling_idefics3 import Idefics3Model

from bench.inputs import GROUP, HELDOUT, PROMPTS, Inputs, job_config
from bench.jobs import FinishedJob
from bench.tables import Table
from bench.trl import SETTLED, compare_with_trl, medians, medians_of, table
from rheostat.infra.store.contracts import Store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.engines import TransformersEngine
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.records.versions import policy_of
from rheostat.models.records.work import RolloutWork, UpdateWork
from rheostat.models.workers.rollout import RolloutWorker
from rheostat.models.workers.update import UpdateWorker
from rheostat.tasks.run.iteration import Iteration
from tests.support.demos import demo_module
from tests.support.loopback import free_port

SIDE, TOKENS, ITERATIONS = 96, 32, 4
SETTINGS, MODEL = (demo_module("vision", name) for name in ("scratch_vision", "scratch_idefics3"))
POLICY = SETTINGS.VisionScratchPolicy(
    tower=SETTINGS.ScratchTower(image_size=SIDE, patch_size=8, layers=4),
    decoder=ScratchPolicy(
        vocab_size=359, hidden_size=64, intermediate_size=192, layers=3, heads=4, kv_heads=2, context=256
    ),
)
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def measure() -> Iterator[Table]:
    """Compare training iterations of a vision-language policy in Rheostat and TRL.

    Yields a table of their times, and a table of the CPU seconds that Rheostat spends in the vision tower.
    """
    with tempfile.TemporaryDirectory(prefix="rheostat-bench-") as name:
        directory = Path(name)
        inputs, pictures = _write_inputs(directory)
        with compare_with_trl(inputs, iterations=ITERATIONS, images=pictures) as (job, theirs):
            ours, other = medians_of(job.run), medians(theirs)
            generated, trained = _tower_of_generation(job), _tower_of_update(job)
    num_images = theirs[-1].images
    model = f"Idefics3-shaped, tower of width {POLICY.tower.hidden_size} and {POLICY.tower.layers} layers"
    yield table(
        f"{model}, a picture of {SIDE} × {SIDE} pixels each",
        ours,
        other,
        max_new_tokens=TOKENS,
        iterations=ITERATIONS,
        more=(
            ("images in completed prompts, per second", *_rates(ours.seconds, other.seconds)),
            ("images encoded by the vision tower", generated.images * 2 + trained.images, num_images, ""),
        ),
    )
    yield Table(
        title="CPU seconds of the vision tower",
        columns=("", "seconds", "in the tower", "share", "images read", "completions"),
        rows=(generated.row("rollout of half an iteration"), trained.row("update of an iteration")),
    )


def _rates(ours: float, theirs: float) -> tuple[float, float, float]:
    num_images = PROMPTS * GROUP
    return num_images / ours, num_images / theirs, theirs / ours


@dataclass(slots=True)
class Clock:
    """CPU seconds of a rollout or update, in total (`whole`) and in the vision tower (`seconds`).

    Also the number of images that the vision tower encoded.
    """

    seconds: float = 0.0
    images: int = 0
    whole: float = 0.0
    completions: int = 0

    def row(self, name: str) -> tuple[str | float, ...]:
        return name, self.whole, self.seconds, self.seconds / self.whole, self.images, self.completions


def _clocked(work: Callable[[], object], *, completions: int) -> Clock:
    """Call `work` and measure the CPU seconds of forward and backward passes of the vision tower.

    A backward pass is timed from the first gradient of the tower's output to the last gradient of its parameters.
    `completions` is the number of completions that `work` processes.
    """
    clock, plain = Clock(completions=completions), Idefics3Model.get_image_features

    @wraps(plain)  # transformers reads its signature
    def timed(model: Idefics3Model, pixel_values: Tensor, *rest: Any, **options: Any) -> Any:
        began = time.process_time()
        outputs = plain(model, pixel_values, *rest, **options)
        clock.seconds += time.process_time() - began
        clock.images += int(np.prod(pixel_values.shape[:-3]))
        if outputs.pooler_output[0].requires_grad:
            _clock_backward(outputs.pooler_output, [*model.vision_model.parameters(), *model.connector.parameters()])
        return outputs

    def _clock_backward(states: Iterable[Tensor], parameters: list[Tensor]) -> None:
        began: list[float] = []
        for image in states:
            image.register_hook(lambda _: began.append(time.process_time()))

        def ended(_gradients: object) -> None:
            clock.seconds += time.process_time() - began[0]
            hook.remove()  # parameters are shared by all forward passes

        trained = [each for each in parameters if each.requires_grad]
        hook = torch.autograd.graph.register_multi_grad_hook(trained, ended)

    Idefics3Model.get_image_features = timed
    try:
        began = time.process_time()
        work()
        clock.whole = time.process_time() - began
    finally:
        Idefics3Model.get_image_features = plain
    return clock


def _tower_of_generation(job: FinishedJob) -> Clock:
    """Generate one shard of the last iteration again, and return the CPU seconds in total and in the vision tower."""
    batch = _last(job).batches[0]
    worker = RolloutWorker(_uri(job.run.store), job.run.name, TransformersEngine(), threads=1)
    work = RolloutWork(
        iteration=batch.plan.number,
        policy=policy_of(batch.policy),
        prompts=batch.prompts.shards[0],
        rows=batch.plan.shard_rows(0),
        group_size=batch.plan.group_size,
        sampling=batch.plan.sampling,
        seed=0,
        media=batch.media,
    )
    worker.take(work.policy)
    return _clocked(lambda: worker.generate(work), completions=len(work.rows) * work.group_size)


def _tower_of_update(job: FinishedJob) -> Clock:
    """Run the update of the last iteration again, and return the CPU seconds in total and in the vision tower."""
    iteration = _last(job)
    settings = UpdateConfig.model_validate(job.run.record.config["update"])
    worker = UpdateWorker(
        _uri(job.run.store), job.run.name, update=settings, algorithm=Grpo(), temperature=1.0, threads=1
    )
    worker.join(0, 1, "127.0.0.1", free_port())
    policy = policy_of(iteration.policy)
    work = UpdateWork(
        iteration=iteration.number,
        policy=policy,
        reference=policy,
        samples=iteration.credit.shards,
        media=iteration.media,
        total_iterations=iteration.number,
        seed=0,
    )
    return _clocked(lambda: worker.update(work), completions=PROMPTS * GROUP)


def _last(job: FinishedJob) -> Iteration:
    return Iteration(job.run, 2 * ITERATIONS + SETTLED)


def _uri(store: Store) -> str:
    return store.uri.rsplit("/", 1)[0]


def _write_inputs(directory: Path) -> tuple[Inputs, tuple[Path, ...]]:
    """Write a random vision-language policy, random images, and the files of a job to a directory.

    Each prompt is a question about one image. Return the job's inputs and the images of its training prompts.
    """
    questions = tuple(f"Picture {row}: Ana has {row % 7} pens. How many? " for row in range(PROMPTS + HELDOUT))
    tokenizer = MODEL.vision_tokenizer(POLICY, questions)
    tokenizer.chat_template = TEMPLATE
    model = MODEL.build_vision_scratch(POLICY, tokenizer, seed=0)
    MODEL.save_vision_scratch(POLICY, model, tokenizer, directory / "policy")
    rng, rows, pictures = np.random.default_rng(0), [], []
    for row, question in enumerate(questions):
        pictures.append(directory / f"{row}.png")
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(pictures[-1])
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        rows.append({"prompt": [{"role": "user", "content": parts}], "answer": "x", "images": pictures[-1].name})
    for name, part in (("train", rows[:PROMPTS]), ("heldout", rows[PROMPTS:])):
        (directory / f"{name}.jsonl").write_text("\n".join(map(json.dumps, part)))
    config = directory / "config.toml"
    config.write_text(job_config(directory, max_new_tokens=TOKENS, update_ranks=1, data='images_column = "images"'))
    policy, shown = directory / "policy", tuple(pictures[:PROMPTS])
    return Inputs(config=config, policy=policy, prompts=questions[:PROMPTS], max_new_tokens=TOKENS), shown
