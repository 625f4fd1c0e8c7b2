"""Two iterations from a tiny random directory of every family of models, compared with plain transformers.

`make test-models` runs this module, and prints a table of its results.
"""

import re
import tomllib

import pytest
import torch
from transformers import AutoModelForCausalLM

from rheostat.infra.errors import BadInput
from rheostat.models.commands.preflight import Inputs, check
from rheostat.models.modeling.logprobs import ForwardInput, TokenLogprobs
from rheostat.models.modeling.policy import load_policy
from rheostat.tasks.config.run import override_config
from tests.support.families import batch
from tests.support.in_process import InProcessJob
from tests.support.jobs import TINY, bundles_of, manifest_of
from tests.support.model_families import FAMILIES, write_family

SETTINGS = (
    "iterations=2",
    "data.options.train_problems=8",
    "data.options.heldout_problems=2",
    "warmup.steps=1",
    "warmup.batch_size=2",
    "rollout.prompts=2",
    "rollout.shard_prompts=2",
    "rollout.group_size=2",
    "rollout.sampling.max_new_tokens=8",
    "scoring.rewards=[{kind='target',target='tests.support.rewards:mean_letter'}]",
    "update.minibatches=1",
    "evaluation.problems=2",
)


@pytest.mark.models
@pytest.mark.timeout(240, method="signal")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_trained_for_two_iterations_computes_what_plain_transformers_computes(
    family, prefect_api, tmp_path, record_property
):
    record_property("family", family)
    write_family(family, tmp_path / "policy")
    job, context = InProcessJob(tmp_path / "job", prefect_api), FAMILIES[family].get("context")
    policy = f"path='{tmp_path / 'policy'}'" + (f",context={context}" if context else "")
    settings = (*SETTINGS, f"policy={{kind='directory',{policy}}}")
    config = override_config(tomllib.loads(TINY), settings, source="tiny")
    inputs = Inputs.model_validate_json(config.model_dump_json())
    if reason := FAMILIES[family].get("refused"):
        with pytest.raises(BadInput, match=re.escape(reason)) as refused:
            check(inputs)
        record_property("result", f"refused: {str(refused.value).partition(': ')[2]}")
        return
    assert [note for note in check(inputs).notes if "not read" in note] == []
    job.train(*settings)
    iterations = [manifest_of(job.run, f"it-000{number}/seal")["metrics"] for number in (1, 2)]
    # The engine decodes with a cache and in other batches than the trainer, so log-probs differ in the last bits.
    assert max(metrics["update/mismatch_difference_max"] for metrics in iterations) < 1e-4
    assert min(metrics["update/grad_norm_mean"] for metrics in iterations) > 0
    compare_with_transformers(bundles_of(job.run, "it-0002/update")["weights"], tmp_path / "policy")
    record_property("result", "trains" + (" if `policy.context` is set" if context else ""))


def compare_with_transformers(directory, initial):
    """Assert that a policy has the log-probs that transformers computes, and other weights than the initial policy."""
    read = batch()
    module = TokenLogprobs(load_policy(directory).eval(), temperature=1.0)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        found_N = module(ForwardInput.from_microbatch(read, torch.device("cpu"), shares=module.shares_prompts))
        logits_BTV = plain(input_ids=torch.from_numpy(read.tokens_BT), use_cache=False).logits.float()
    logits_BTV[..., plain.generation_config.suppress_tokens] = -torch.inf  # as `generate` of transformers does
    logprobs_NV = logits_BTV.flatten(0, 1)[torch.from_numpy(read.positions_N)].log_softmax(-1)
    expected_N = logprobs_NV.gather(1, torch.from_numpy(read.targets_N)[:, None]).squeeze(1)
    torch.testing.assert_close(found_N, expected_N, rtol=0, atol=2e-5)
    before = AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32).state_dict()
    assert any(not torch.equal(weight, before[name]) for name, weight in plain.state_dict().items())
