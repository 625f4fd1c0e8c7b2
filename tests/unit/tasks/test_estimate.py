"""The estimates of `plan --device`, compared with values computed by hand."""

from dataclasses import replace

import pytest

from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.inspection.memory import MicrobatchSizes, frozen_bytes, loading_bytes, peak_bytes
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.placement.roofline import ADAM_BYTES, Accelerator
from rheostat.tasks.views.estimate import estimate, list_loading_notes, loading_excess
from tests.support.configurations import accepted

GPU = Accelerator("G", bfloat16=4e6, float32=1e6, bandwidth=1e15, memory=1e3)
"""Device on which only arithmetic limits the speed."""
FACTS = {
    "parameters": 2000.0,
    "trained_parameters": 2000.0,
    "matmul_parameters": 1000.0,
    "layers": 1.0,
    "query_width": 0.0,  # no attention
    "kv_values_per_token": 0.0,
    "mean_prompt_tokens": 10.4,
    "rollout_weights_bytes": 8000.0,
    "update_weights_bytes": 400.0,
    "update_gradient_bytes": 500.0,
    "pass_logits": 0.0,
}
"""A forward pass of one token takes 2 ms in float32."""
JOB = ("rollout.prompts=4", "rollout.group_size=3", "rollout.shard_prompts=2", "update.minibatches=2")


def estimate_job(*overrides, **facts):
    found = estimate(accepted(*JOB, *overrides), {**FACTS, **facts}, GPU, completion_tokens=5)
    return {stage.stage: stage for stage in found.stages}, found


def test_the_time_of_a_stage_follows_from_its_tokens():
    stages, found = estimate_job("pools.workers=1")
    tokens = 4 * 10 + 4 * 3 * 5  # each prompt once, each completion
    assert stages["prefill"].seconds == pytest.approx(4 * 10 * 2e-3) and stages["prefill"].tokens == 40
    assert stages["decode"].seconds == pytest.approx(4 * 3 * 5 * 2e-3) and stages["decode"].tokens == 60
    assert stages["log-probs before the update"].seconds == pytest.approx(tokens * 2e-3 / 2)  # of the second step
    assert stages["forward and backward"].seconds == pytest.approx(3 * tokens * 2e-3)
    assert stages["optimizer"].seconds == pytest.approx(2 * ADAM_BYTES * 2000 / 1e15)
    assert stages["iteration"].seconds == pytest.approx(sum(stage.seconds for stage in found.stages[:-1]))
    assert "log-probs of reference and teacher" not in stages


def test_estimates_depend_on_ranks_workers_precision_epochs_and_adapters():
    plain, _ = estimate_job("pools.workers=1")
    stages, _ = estimate_job("pools.workers=2", "update.dtype=bfloat16", "update.epochs=2", "update.kl.kind=k3")
    assert stages["decode"].seconds == pytest.approx(plain["decode"].seconds / 2)
    assert stages["forward and backward"].seconds == pytest.approx(2 * plain["forward and backward"].seconds / 4)
    assert stages["log-probs of reference and teacher"].seconds == pytest.approx(100 * 2e-3 / 4)
    masked, _ = estimate_job("pools.workers=1", "update.top_entropy=0.2")  # also the first step
    assert masked["log-probs before the update"].seconds == pytest.approx(100 * 2e-3)
    adapted, _ = estimate_job("pools.workers=1", "update.lora.rank=2", trained_parameters=20.0)
    assert adapted["forward and backward"].seconds == pytest.approx(2 * 100 * 2e-3)
    assert adapted["optimizer"].seconds == pytest.approx(plain["optimizer"].seconds / 100)


def test_worker_memory_is_compared_with_the_device_and_offloaded_state_counts_as_host_memory():
    _, found = estimate_job()
    assert [memory.text for memory in found.memory] == [
        "rollout worker: 8e-06 GB of 0 GB (without libraries); this does not fit",
        "update worker: 1.07 GB of 0 GB (with 1.1 GB for libraries); this does not fit",
    ]
    # A 32nd of 1,000 bytes has room for 2 logits in three tensors of 4 bytes: 24 bytes next to 400 and 500.
    offloaded = ("update.zero_stage=2", "update.offload=optimizer")
    _, found = estimate_job(*offloaded, update_optimizer_bytes=300.0, pass_logits=9.0)
    assert found.memory[1].gigabytes - found.memory[1].libraries == pytest.approx(9.24e-07, rel=1e-6)
    assert "(with 3.1 GB for libraries), and 3e-07 GB of machine memory" in found.memory[1].text
    sizes = {"update_optimizer_bytes": 300.0, "pass_logits": 1.0, "update_writing_bytes": 5000.0}
    _, found = estimate_job("update.zero_stage=2", **sizes)
    assert found.memory[1].gigabytes - found.memory[1].libraries == pytest.approx(1.212e-06, rel=1e-6)


def test_an_update_rank_that_needs_the_most_memory_while_it_loads_is_described_so():
    _, later = estimate_job()
    _, found = estimate_job(loading_policy_bytes=500.0)  # as much as gradients
    assert not found.memory[1].is_loading and found.memory == later.memory
    _, found = estimate_job(loading_policy_bytes=2e9)
    assert found.memory[1].text == (
        "update worker: 3.07 GB of 0 GB (while it loads the model, with 1.1 GB for libraries); this does not fit"
    )


def test_every_model_may_be_the_last_one_that_a_rank_loads():
    update = UpdateConfig(zero_stage=3)
    kept = {"weights": 10.0, "gradient": 20.0, "optimizer": 40.0, "reference": 5.0, "buckets": 3.0}
    critic = {"critic_weights": 1.0, "critic_gradient": 2.0, "critic_optimizer": 4.0}
    parts = {**kept, **critic, "activations": 30.0}
    loading = {"loading_policy_bytes": 70.0, "loading_critic_bytes": 41.0, "loading_reference_bytes": 33.0}
    assert loading_excess(parts, loading, update) == 41 - 2 - 4 - 30  # the critic has no gradients and optimizer yet
    assert loading_excess(parts, loading | {"loading_teacher_bytes": 36.0}, update) == 36 - 30
    assert loading_excess(parts, {"loading_policy_bytes": 70.0}, update) == 0
    parts = {"weights": 10.0, "gradient": 2.0, "buckets": 3.0}  # which do not exist between updates before ZeRO-3
    assert loading_excess(parts, {"loading_policy_bytes": 7.0}, UpdateConfig()) == 10 + 7 - 15


def test_the_plan_names_models_that_are_loaded_as_a_whole():
    facts = {"policy_loads_whole": 1.0, "teacher_loads_whole": 1.0}
    first, second = list_loading_notes(accepted("update.zero_stage=3"), facts)
    assert first.startswith("update.zero_stage is 3, but each update rank loads the whole policy in float32 first.")
    assert "the whole teacher" in second
    [note] = list_loading_notes(accepted("update.dtype=bfloat16"), {"critic_loads_whole": 1.0})
    assert note.startswith("update.dtype is 'bfloat16', but each update rank loads the whole critic")
    assert not [*list_loading_notes(accepted("update.zero_stage=3"), {"loading_policy_bytes": 1.0})]


LLAMA_70B = DecoderSizes(
    "llama", 128256, 8192, 28672, layers=80, heads=64, kv_heads=8, head_size=128, context=8192, tied=False
)


@pytest.mark.parametrize(
    ("changes", "ranks", "gigabytes"),
    [
        ({"zero_stage": 3, "dtype": "bfloat16"}, 16, 141.1 / 16 + 1.0507 * (2 + 8)),  # shard, and the embeddings
        ({"zero_stage": 3, "dtype": "float32"}, 16, 282.2 / 16 + 1.0507 * (4 + 8)),
        ({"zero_stage": 2, "dtype": "bfloat16"}, 16, 141.1 + 1.0507 * (2 + 8)),
        ({"zero_stage": 0, "dtype": "float32"}, 16, 282.2),  # a trial reads the weights themselves
    ],
)
def test_the_peak_while_a_70b_model_is_loaded_is_its_shard_and_copies_of_one_weight(changes, ranks, gigabytes):
    model = LLAMA_70B.outline()
    update = UpdateConfig(**changes)
    found = frozen_bytes(update, model, ranks=ranks) + loading_bytes(update, model)
    assert found / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_a_model_that_cannot_be_sharded_while_it_is_loaded_counts_as_a_whole():
    update, sizes = UpdateConfig(zero_stage=3, dtype="bfloat16"), MicrobatchSizes(1000)
    outline = replace(LLAMA_70B.outline(), loads_directly=False)
    facts = peak_bytes(update, outline, sizes, ranks=16, has_reference=True)
    assert facts["loading_policy_bytes"] > 282e9 and facts["policy_loads_whole"] == 1
    assert facts["update_reference_bytes"] == 2 * outline.parameters // 16
    assert facts["loading_reference_bytes"] == facts["loading_policy_bytes"]
    assert "policy_loads_whole" not in peak_bytes(update, LLAMA_70B.outline(), sizes, ranks=16, has_reference=True)


def test_matmul_parameters_are_the_same_with_and_without_building_the_model():
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
    from transformers.initialization import no_init_weights

    from rheostat.models.modeling.adapters import outline

    sizes = DecoderSizes("llama", 300, 16, 24, layers=2, heads=4, kv_heads=2, head_size=4, context=32)
    shape = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    with no_init_weights():
        llama = LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True))
        mixtral = MixtralForCausalLM(MixtralConfig(**shape, **heads, num_local_experts=4, num_experts_per_tok=2))
    projections = 16 * 16 + 2 * 16 * 8 + 16 * 16
    by_hand = 2 * (projections + 3 * 16 * 24) + 300 * 16
    assert outline(llama).matmul_parameters == sizes.outline().matmul_parameters == by_hand
    # Of four experts two, and the router that chooses them; the head is not the embedding.
    assert outline(mixtral).matmul_parameters == 2 * (projections + 2 * 3 * 16 * 24 + 4 * 16) + 300 * 16
