"""Teachers and references of policies that see: what they say of rollouts with images, and which are refused."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from infra.errors import BadInput
from infra.store.bundles import fetch_bundle
from infra.store.shards import read_shard, write_shard
from infra.store.storage import open_store
from models.config.algorithms import DistillationOnly
from models.config.data import PixelLimits
from models.config.teachers import Distillation, TeacherDirectory
from models.data.problems import Problem
from models.inspection.images import check_teacher_sees
from models.records.schemas import ROLLOUT_SCHEMA
from models.records.work import EstimateWork, ScoredShard
from models.vision.processor import load_processor
from models.workers.update import UpdateWorker
from tests.support.pictures import picture
from tests.support.policies import write_policy
from tests.support.rollout_shards import rollout
from tests.support.seeing import PICTURES, logits_of, prompts_of, publish_seeing, write_media
from tests.support.teachers import teacher_at
from tests.support.update_workers import CONFIG, free_port
from tests.support.vision import FAMILIES, write_seeing

SHOWN = [1, 0, 1, 1]


def estimate(uri: str, kind: str, distillation: Distillation, **changes):
    """Have a teacher of other weights score random completions; return estimates, rollouts and the teacher."""
    store = open_store(f"{uri}/run")
    names = enumerate(("seeing", "teacher"))
    policy, teacher = (publish_seeing(f"{uri}/run", Path(uri, name), kind, seed=seed) for seed, name in names)
    rng = np.random.default_rng(3)
    rows = []
    for row, each in enumerate(prompts_of(Path(uri, "seeing"), SHOWN)):
        written = rng.integers(20, 280, 4 + row).tolist()
        rows.append(
            rollout(row, 0, "", images=each.images, prompt_tokens=each.tokens.tolist(), completion_tokens=written)
            | {"logprobs": [-5.0] * len(written)}
        )
    shard = write_shard(store, pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), kind="rollouts", metadata={})
    worker = UpdateWorker(
        uri,
        "run",
        update=CONFIG,
        algorithm=DistillationOnly(distillation=distillation),
        temperature=0.9,
        threads=1,
    )
    worker.join(0, 1, "127.0.0.1", free_port())
    work = EstimateWork(
        iteration=0,
        shards=(ScoredShard(shard, shard),),
        policy=policy,
        reference=policy,
        teacher=teacher,
        media=(write_media(f"{uri}/run"),),
    )
    made = worker.estimate(replace(work, **changes))
    return read_shard(store, made.shards[0]), rows, fetch_bundle(store, teacher.weights)


@pytest.mark.parametrize("kind", ["idefics3", "qwen2_5_vl", "gemma3"])
def test_a_teacher_says_of_tokens_after_images_what_transformers_says(uri, kind):
    estimates, rows, directory = estimate(uri, kind, Distillation(teacher=TeacherDirectory(path=Path("elsewhere"))))
    banned = list(load_processor(directory).banned)
    for row, said in zip(rows, estimates["teacher"].to_pylist(), strict=True):
        if not row["images"]:
            continue
        prompt, completion = row["prompt_tokens"], row["completion_tokens"]
        logits_TV = logits_of(directory, [*prompt, *completion], PICTURES[row["images"][0]]) / 0.9
        logits_TV[:, banned] = -float("inf")
        logprobs_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs_TV[range(len(completion)), completion].numpy()
        np.testing.assert_allclose(said, expected, atol=2e-5)


def test_a_teacher_behind_an_endpoint_is_never_asked_about_tokens_that_stand_for_images(uri):
    teacher = Distillation(teacher=teacher_at("http://127.0.0.1:1/v1"))
    with pytest.raises(BadInput, match="it is asked about token ids alone, found a prompt with images"):
        estimate(uri, "idefics3", teacher, teacher=None)


# ---- before the run

PROBLEM = Problem("a.jsonl:7", "How many?", "1", images=(picture("red", (24, 24)),))


def refusal(teacher, policy: Path, *, limits: PixelLimits | None = None) -> str:
    with pytest.raises(BadInput) as raised:
        check_teacher_sees(teacher, [PROBLEM], load_processor(policy), limits=limits or PixelLimits())
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_teacher_that_reads_images_as_the_policy_does_is_taken(tmp_path, kind):
    policy, teacher = (write_seeing(tmp_path / name, kind) for name in ("policy", "teacher"))
    check_teacher_sees(TeacherDirectory(path=teacher), [PROBLEM], load_processor(policy), limits=PixelLimits())


def test_a_teacher_that_does_not_see_is_bad_input_where_problems_show_images(tmp_path):
    policy = write_seeing(tmp_path / "policy", "idefics3")
    write_policy(tmp_path / "text")
    said = refusal(TeacherDirectory(path=tmp_path / "text"), policy)
    assert "teacher: a.jsonl:7 shows images: expected a teacher that sees, found one that reads text alone" in said
    said = refusal(teacher_at("http://127.0.0.1:1/v1"), policy)
    assert "expected a directory of a teacher that sees; an endpoint is asked about tokens alone" in said
    text = [replace(PROBLEM, images=())]
    check_teacher_sees(TeacherDirectory(path=tmp_path / "text"), text, load_processor(policy), limits=PixelLimits())


def test_a_teacher_that_reads_other_tokens_of_an_image_is_bad_input_unless_the_limits_make_them_alike(tmp_path):
    policy, teacher = (write_seeing(tmp_path / name, "qwen2_5_vl") for name in ("policy", "teacher"))
    settings = policy / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace("1024", "144"))
    said = refusal(TeacherDirectory(path=teacher), policy)
    assert re.search(r"an image of a.jsonl:7, 24 x 24, is 9 tokens to it, expected the [1-4] of the policy", said)
    limits = PixelLimits(most=144)
    check_teacher_sees(TeacherDirectory(path=teacher), [PROBLEM], load_processor(policy), limits=limits)
