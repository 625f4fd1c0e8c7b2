"""Worker that prepares a run: the initial policy, auxiliary models, and the prompts of both splits."""

import time
from pathlib import Path
from typing import Final

import PIL
import pyarrow as pa
import torch
from blake3 import blake3
from pydantic import JsonValue

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle, publish_bundle
from rheostat.infra.store.inputs import fetch_path
from rheostat.infra.store.runs import run_store
from rheostat.infra.store.shards import write_shard
from rheostat.models.data.canonical import drop_absent
from rheostat.models.data.images import media_tables
from rheostat.models.data.problems import (
    Problem,
    encode_columns,
    encode_template_input,
    find_exclusions,
    identity,
    load_problems,
)
from rheostat.models.data.reading import report_reading
from rheostat.models.denoising.policy import policy_context
from rheostat.models.environments.runtime import tools_of
from rheostat.models.inspection.other_models import check_teacher
from rheostat.models.modeling.critic import write_critic
from rheostat.models.modeling.directory import copy_directory
from rheostat.models.modeling.generation_config import complete_generation_config
from rheostat.models.modeling.initial import iterate_texts, write_policy, write_served_model, write_user
from rheostat.models.records.media import MEDIA
from rheostat.models.records.model_input import prompt_columns
from rheostat.models.records.schemas import PROMPT_SCHEMA, TEMPLATE
from rheostat.models.records.versions import ModelVersion, Outcome
from rheostat.models.records.work import (
    CriticWork,
    PolicyWork,
    PromptWork,
    RewardModelPreparation,
    TeacherWork,
    UserPreparation,
)
from rheostat.models.text.tokenizer import TokenizedPrompt, enforce_prompt_length, load_tokenizer, tokenize_problems
from rheostat.models.vision.pixels import limit_pixels
from rheostat.models.vision.processor import load_processor

PILLOW: Final = f"pillow {PIL.__version__}"
"""Name and version of the image decoder. It is recorded because other versions may decode JPEG slightly differently."""


class PreparationWorker:
    """Worker that builds the inputs of a run, such as the initial policy and the tokenized prompts. The same request
    gives the same bytes in any process."""

    def __init__(self, store_uri: str, run: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self._store = run_store(store_uri, run)
        self._run = run
        self._progress = 0

    def progress(self) -> int:
        """Return the number of finished parts of the work. If the number stops growing, the worker is stuck."""
        return self._progress

    def make_policy(self, work: PolicyWork) -> Outcome:
        """Build or import the run's initial policy, before any training, and publish it as version 0."""
        started = time.perf_counter()
        with self._store.scratch() as folder:
            parameters = write_policy(work.policy, folder, texts=iterate_texts(work.data, work.seed), seed=work.seed)
            limit_pixels(folder, work.data.pixels)
            if not work.policy.generates_images:
                complete_generation_config(folder, work.data.text_rules)
            self._progress += 1
            ref = publish_bundle(self._store, folder, prefix="policies")
        self._progress += 1
        return Outcome(
            model=ModelVersion(version=0, weights=ref),
            metrics={"parameters": parameters},
            timings={"make": time.perf_counter() - started},
        )

    def make_critic(self, work: CriticWork) -> Outcome:
        """Build or import the initial critic, which uses the policy's tokenizer, and publish it as version 0."""
        started = time.perf_counter()
        policy = fetch_bundle(self._store, work.policy.weights)
        with self._store.scratch() as folder:
            parameters = write_critic(
                None if work.critic.path is None else fetch_path(work.critic.path), policy, folder
            )
            self._progress += 1
            ref = publish_bundle(self._store, folder, prefix="critics")
        self._progress += 1
        return Outcome(
            critic=ModelVersion(version=0, weights=ref),
            metrics={"parameters": parameters},
            timings={"make": time.perf_counter() - started},
        )

    def make_reward_model(self, work: RewardModelPreparation) -> Outcome:
        """Build or import the judge or reward model that computes one of the rewards, and publish it as version 0."""
        started = time.perf_counter()
        with self._store.scratch() as folder:
            problems = load_problems(work.data, "train", work.seed)
            parameters = write_served_model(work.reward, folder, problems=problems, seed=work.seed)
            if work.reward.kind == "judge":
                complete_generation_config(folder, work.data.text_rules)
            self._progress += 1
            ref = publish_bundle(self._store, folder, prefix="judges")
        self._progress += 1
        return Outcome(
            model=ModelVersion(version=0, weights=ref),
            metrics={"parameters": parameters},
            timings={"make": time.perf_counter() - started},
        )

    def make_user(self, work: UserPreparation) -> Outcome:
        """Build or import the simulated user (the model that plays the user), and publish it as version 0."""
        started = time.perf_counter()
        with self._store.scratch() as folder:
            problems = load_problems(work.data, "train", work.seed)
            parameters = write_user(work.environment, folder, problems=problems, seed=work.seed)
            complete_generation_config(folder, work.data.text_rules)
            self._progress += 1
            ref = publish_bundle(self._store, folder, prefix="users")
        self._progress += 1
        return Outcome(
            model=ModelVersion(version=0, weights=ref),
            metrics={"parameters": parameters},
            timings={"make": time.perf_counter() - started},
        )

    def make_teacher(self, work: TeacherWork) -> Outcome:
        """Copy the teacher model and publish it as version 0. Raises BadInput if it does not fit the policy."""
        started = time.perf_counter()
        tokenizer = load_tokenizer(fetch_bundle(self._store, work.policy.weights))
        model = check_teacher(work.teacher, tokenizer, longest_tokens=work.longest_tokens, where=work.where)
        assert model is not None, "a teacher behind an endpoint has no files"
        with self._store.scratch() as folder:
            copy_directory(fetch_path(work.teacher.path), folder)
            limit_pixels(folder, work.pixels)
            self._progress += 1
            ref = publish_bundle(self._store, folder, prefix="teachers")
        self._progress += 1
        return Outcome(
            model=ModelVersion(version=0, weights=ref),
            metrics={"parameters": model.parameters},
            timings={"make": time.perf_counter() - started},
        )

    def make_prompts(self, work: PromptWork) -> Outcome:
        """Render and tokenize the prompts of one data split, check their lengths, and write them as shards. The first
        shard contains the prompts, in the order of the problems. Further shards contain the images in the prompts.
        Raises BadInput if no problem remains."""
        started = time.perf_counter()
        problems = load_problems(work.data, work.split, work.seed)
        self._progress += 1
        directory = fetch_bundle(self._store, work.policy.weights)
        context = policy_context(directory)
        tokenizer = load_tokenizer(directory)
        tools = tools_of(work.environment, problems)
        prompts = tokenize_problems(
            problems, tokenizer, load_processor(directory), tools=tools, rules=work.data.text_rules
        )
        if work.split == "train" and work.data.exclude_ids_path is not None:
            problems, prompts = _exclude_listed(problems, prompts, fetch_path(work.data.exclude_ids_path))
        room, too_long = context - work.max_new_tokens, work.data.long_prompts
        fitting = enforce_prompt_length(
            [*zip(problems, prompts, strict=True)], max_tokens=room, too_long=too_long, split=work.split
        )
        left_out: dict[str, float] = {"too_long": len(problems) - len(fitting)} if too_long == "drop" else {}
        left_out |= report_reading(work.data, work.split).dropped
        problems, prompts = [problem for problem, _ in fitting], [prompt for _, prompt in fitting]
        self._progress += 1
        metadata = {"run": self._run, "split": work.split, "weights_digest": work.policy.weights.digest}
        ref = write_shard(self._store, _build_table(problems, prompts), kind="prompts", metadata=metadata)
        self._progress += 1
        media = []
        for table in media_tables(image for problem in problems for image in problem.images):
            media.append(write_shard(self._store, table, kind=MEDIA, metadata=metadata | {"producer": PILLOW}))
            self._progress += 1
        lengths = [len(prompt.input) for prompt in prompts]
        image_counts = {"images": sum(shard.rows for shard in media)} if media else {}
        weights = work.data.weights if work.split == "train" else ()
        parts = [sum(problem.part == part for problem in problems) for part in range(len(weights))]
        dropped = find_exclusions(work.data, work.seed) if work.split == "train" else {}
        detail: dict[str, JsonValue] = {"parts": {"rows": [*parts], "weights": [*weights]}} if parts else {}
        return Outcome(
            shards=(ref, *media),
            detail=detail | ({"left_out": {**dropped}} if dropped else {}) or None,
            metrics={
                "prompts": len(prompts),
                "tokens": sum(lengths),
                "longest": max(lengths),
                **left_out,
                **image_counts,
            },
            timings={"make": time.perf_counter() - started},
        )


def _exclude_listed(
    problems: list[Problem], prompts: list[TokenizedPrompt], path: Path
) -> tuple[list[Problem], list[TokenizedPrompt]]:
    """Remove the problems whose prompt IDs are listed in the file `path`, together with their prompts. Raises BadInput
    if no problem remains."""
    left_out = {*path.read_text().split()}
    pairs = zip(problems, prompts, strict=True)
    names = zip(_names(problems, prompts), _names(problems, prompts, version=1), strict=True)
    remaining = [pair for pair, ids in zip(pairs, names, strict=True) if left_out.isdisjoint(ids)]
    if not remaining:
        raise BadInput(
            f"data.exclude_ids_path is {path}, which excludes all {len(problems)} problems of the data. Remove some "
            "of its lines, or add problems"
        )
    return [problem for problem, _ in remaining], [prompt for _, prompt in remaining]


def _names(problems: list[Problem], prompts: list[TokenizedPrompt], *, version: int = 2) -> list[str]:
    """Return the prompt ID of each problem: a hash of the prompt's text, its images and the columns of its row. Earlier
    runs recorded IDs of `version` 1. IDs of version 2 are the same for every format of the data file."""
    return [
        blake3(
            identity(
                prompt.text,
                prompt.input.images,
                problem.columns if min(version, problem.identity_version) == 1 else drop_absent(problem.columns),
            ).encode()
        ).hexdigest()[:16]
        for problem, prompt in zip(problems, prompts, strict=True)
    ]


def _build_table(problems: list[Problem], prompts: list[TokenizedPrompt]) -> pa.Table:
    columns = {
        "prompt_id": _names(problems, prompts),
        "text": [prompt.text for prompt in prompts],
        **prompt_columns([prompt.input for prompt in prompts]),
        "answer": [problem.answer for problem in problems],
        "columns": [encode_columns(problem.columns) for problem in problems],
        "messages": [_encode_messages(problem) for problem in problems],
    }
    inputs = [encode_template_input(problem.prompt, problem.template) for problem in problems]
    if not any(inputs):
        return pa.table(columns, schema=PROMPT_SCHEMA)
    return pa.table(columns | {TEMPLATE: inputs}, schema=PROMPT_SCHEMA.append(pa.field(TEMPLATE, pa.string())))


def _encode_messages(problem: Problem) -> list[dict[str, str | None]] | None:
    """Return the messages of a problem's chat prompt as dicts, or None if the prompt is plain text."""
    if isinstance(problem.prompt, str):
        return None
    return [{"role": each.role, "content": each.text, "name": each.name or None} for each in problem.prompt]
