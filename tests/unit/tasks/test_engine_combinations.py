"""What a vLLM engine cannot serve is refused with the reason and the way out."""

import pytest

from tests.support.configurations import accepted, refusal

VLLM = "rollout.engine.kind=vllm"
RAW = "rollout.engine.logprobs=raw"
JUDGE = "scoring.rewards=[{kind='judge', slots=2, model={kind='trained', engine={kind='vllm', tensor_parallel=4}}}]"


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=40"])
def test_truncated_log_probs_are_not_compared_with_whole_ones(cut):
    told = refusal(VLLM, f"rollout.sampling.{cut}")
    assert f"rollout.sampling.{cut.replace('=', ' ')} with rollout.engine.logprobs 'processed'" in told
    assert "the trainer's of the whole; set rollout.engine.logprobs='raw', or sample without truncation" in told
    assert accepted(VLLM, RAW, f"rollout.sampling.{cut}").rollout.engine.logprobs == "raw"
    assert accepted(f"rollout.sampling.{cut}").rollout.engine.kind == "transformers"


def test_untempered_log_probs_are_not_compared_with_tempered_ones():
    warm = "rollout.sampling.temperature=0.7"
    assert "'raw' with rollout.sampling.temperature 0.7: the trainer's are tempered; use 'proc" in refusal(
        VLLM, RAW, warm
    )
    assert accepted(VLLM, warm).rollout.sampling.temperature == 0.7


def test_a_temperature_that_vllm_does_not_take_is_refused():
    hot = "rollout.sampling.temperature=2.5"
    assert "temperature 2.5 with rollout.engine.kind 'vllm': it takes 2 at most" in refusal(VLLM, hot)
    assert accepted(hot).rollout.sampling.temperature == 2.5


def test_tempered_and_truncated_sampling_has_one_way_out():
    both = (VLLM, "rollout.sampling.temperature=0.7", "rollout.sampling.top_k=40")
    assert "set rollout.engine.logprobs='raw' and rollout.sampling.temperature=1" in refusal(*both)
    assert "sample at temperature 1" in refusal(*both, RAW)


def test_an_adapter_beyond_vllms_largest_rank_is_refused():
    told = refusal(VLLM, "update.lora.rank=513")
    assert "update.lora.rank 513 with rollout.engine.kind 'vllm': it serves adapters of a rank up to 512" in told
    assert accepted(VLLM, "update.lora.rank=512").update.lora.rank == 512
    assert accepted("update.lora.rank=513").update.lora.rank == 513


def test_adapters_on_a_gpu_are_served_in_16_bits():
    placed = (VLLM, "update.lora.rank=8", "pools.gpus_per_worker=1")
    assert "set rollout.engine.dtype='bfloat16'" in refusal(*placed)
    assert accepted(*placed, "rollout.engine.dtype=bfloat16").rollout.engine.dtype == "bfloat16"


def test_a_server_over_several_gpus_needs_a_worker_that_has_them():
    spread = (VLLM, "rollout.engine.tensor_parallel=4")
    told = refusal(*spread, "pools.gpus_per_worker=2")
    assert "rollout.engine.tensor_parallel 4: its worker has 2 GPUs, expected as many; set pools.gpus_per_w" in told
    accepted(*spread, "pools.gpus_per_worker=4")
    accepted(*spread, 'rollout.engine.base_urls=["http://127.0.0.1:8000"]')


def test_a_judge_has_the_gpus_of_all_its_slots():
    workers = "pools.workers=3"
    assert "reward 'judge': model.engine.tensor_parallel 4: its worker has 2 GPUs" in refusal(
        JUDGE, workers, "pools.gpus_per_worker=1"
    )
    assert accepted(JUDGE, workers, "pools.gpus_per_worker=2").scoring.hosted_rewards


def test_workers_on_one_gpu_share_its_memory():
    half = (VLLM, "pools.gpus_per_worker=0.5")
    told = refusal(*half)
    assert "gpu_memory_share 0.85: 2 workers share a GPU at pools.gpus_per_worker 0.5, so expected at most 0.5" in told
    accepted(*half, "rollout.engine.gpu_memory_share=0.5")
    accepted(*half, "pools.workers=1")


def test_a_key_is_for_servers_that_run_already():
    named = (VLLM, "rollout.engine.api_key_variable=KEY")
    assert "set rollout.engine.base_urls" in refusal(*named)
    accepted(*named, 'rollout.engine.base_urls=["http://127.0.0.1:8000"]')


def test_experts_are_replayed_of_engines_that_tell_them_and_of_completions_that_are_read_once():
    replay = "update.router_replay=rollout"
    assert accepted(replay).update.router_replay == "rollout"
    assert accepted(VLLM, replay).update.router_replay == "rollout"
    told = refusal(replay, "rollout.environment.kind=python")
    assert "update.router_replay with rollout.environment: what is read again in each turn has no one choice" in told


def test_experts_are_replayed_of_servers_on_gpus_that_cache_prefixes():
    uncached = (VLLM, "update.router_replay=rollout", "rollout.engine.prefix_caching=false")
    told = refusal(*uncached, "pools.gpus_per_worker=1")
    assert "update.router_replay with rollout.engine.prefix_caching=false on GPUs: vLLM tells which experts" in told
    accepted(*uncached)
    accepted(*uncached, "pools.gpus_per_worker=1", 'rollout.engine.base_urls=["http://127.0.0.1:8000"]')
