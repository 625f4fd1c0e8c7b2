"""A run that trains the policy on single completions with labels, then by reinforcement with a likelihood term."""

import json

import pytest

from tests.support.in_process import InProcessJob
from tests.support.jobs import manifest_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_a_run_trains_on_labels_and_on_correct_completions(tmp_path, prefect_api):
    labels = tmp_path / "labels.jsonl"
    rows = [{"prompt": f"{n}+1=", "completion": f"#### {n + 1 + n % 2}", "label": n % 2 == 0} for n in range(40)]
    labels.write_text("\n".join(map(json.dumps, rows)))
    job = InProcessJob(tmp_path, prefect_api)
    job.train(
        "iterations=1",
        f"preferences={{kind='labels',path='{labels}'}}",
        "dpo={steps=2,batch_size=4,loss={kind='kto'}}",
        "update.positive_nll={min_reward=0.0}",
        "update.loss.kind=vespo",
        "update.correction.kind=none",
    )
    trained = manifest_of(job.run, "policy/dpo")["metrics"]
    assert trained["pairs"] + trained["heldout_pairs"] == 40
    assert {"heldout_desirable_reward", "heldout_undesirable_reward", "heldout_accuracy"} <= trained.keys()
    updated = manifest_of(job.run, "it-0001/update")["metrics"]
    assert updated["positive_fraction"] == 1, "every score is at least 0"
    assert updated["positive_nll"] == pytest.approx(updated["entropy"])
