"""The roofline model and the arithmetic of an update, compared with values computed by hand."""

import math
from dataclasses import replace

import pytest

from bench.decoders import QWEN3_0_6B, QWEN3_1_7B, TINY, Decoder
from bench.device import peak_flops
from bench.gpu import SCALES, server_share
from rheostat.infra.errors import BadInput
from rheostat.placement.roofline import (
    ADAM_BYTES,
    Device,
    Generated,
    compute_limit,
    compute_utilization,
    decode_seconds,
    forward_flops,
    shared_flops,
    train_flops,
)

# One layer of width 4, head of 2: projections 2·4·2·(2 + 1) = 48, MLP 3·4·8 = 96, head and embedding 10·4 = 40.
SMALL = Decoder(
    name="small", hidden_size=4, layers=1, heads=2, kv_heads=1, head_dim=2, intermediate_size=8, vocabulary=10,
    context=64,
)  # fmt: skip
ALONE = Generated(prompts=(3,), lengths=((2,),))
MADE = Generated(prompts=(3, 5), lengths=((2, 1), (2,)))
SLOW_MEMORY = Device(flops=1e9, bandwidth=100)
SLOW_ARITHMETIC = Device(flops=1000, bandwidth=1e9)


def test_weights_are_counted_by_their_use():
    assert SMALL.matmul_parameters == 48 + 96 + 40
    assert SMALL.parameters == 184 + 2 * (4 + 2) + 4
    assert SMALL.kv_values_per_token == 2 * 1 * 1 * 2
    assert QWEN3_0_6B.parameters == 596_049_920  # as published
    assert QWEN3_1_7B.parameters == 1_720_574_976


def test_a_forward_pass_costs_two_flops_per_weight_and_token_and_half_of_square_attention():
    # Two sequences of 5 and 4 tokens: 2·184·9, and 2·1·4·(25 + 16).
    assert forward_flops(SMALL, [5, 4]) == 2 * 184 * 9 + 2 * 4 * 41
    assert train_flops(SMALL, [5, 4]) == 3 * (2 * 184 * 9 + 2 * 4 * 41)


@pytest.mark.parametrize(
    ("generated", "device", "seconds"),
    [
        # Slow memory reads 368 bytes of weights per step and 8 per key and value.
        # Step 1: three live, contexts 4, 4, 6; step 2: two live, contexts 5, 7.
        (MADE, SLOW_MEMORY, (368 + 8 * 14) / 100 + (368 + 8 * 12) / 100),
        # Slow arithmetic: 368 per live sequence, and 4·1·4 = 16 per context.
        (MADE, SLOW_ARITHMETIC, (3 * 368 + 16 * 14) / 1000 + (2 * 368 + 16 * 12) / 1000),
        # The longest completion is decoded step by step on however many workers.
        (ALONE, replace(SLOW_MEMORY, workers=8), (368 + 8 * 4) / 100 + (368 + 8 * 5) / 100),
        # Two workers halve the keys and values but not the weights.
        (Generated(prompts=(3,), lengths=((1, 1),)), replace(SLOW_MEMORY, workers=2), (368 + 8 * 4) / 100),
    ],
)
def test_decoding_takes_the_seconds_worked_by_hand(generated, device, seconds):
    assert decode_seconds(generated, SMALL, device, bytes_per_weight=2) == pytest.approx(seconds)


def test_an_iteration_is_the_sum_of_its_stages():
    found = compute_limit(MADE, SMALL, SLOW_ARITHMETIC, bytes_per_weight=2, steps=4)
    # Prompts of 3 and 5 once, and completions of 2, 1 and 2. Attention, 16 per pair of tokens: in the prompts
    # 9/2 + 25/2, of the completions on their prompts 6 + 3 + 10, and among themselves 4/2 + 1/2 + 4/2.
    one_pass = (2 * 184 * 13 + 16 * (17 + 19 + 4.5)) / 1000
    assert MADE.tokens == 5
    assert found.prefill == pytest.approx(2 * 184 * 8 / 1000)  # each prompt once, whatever its group's size
    assert found.logprobs == pytest.approx(0.75 * one_pass)
    assert found.train == pytest.approx(3 * one_pass)
    assert found.train == pytest.approx(3 * shared_flops(SMALL, MADE) / 1000)
    assert found.optimizer == pytest.approx(4 * ADAM_BYTES * 200 / 1e9)
    assert found.seconds == pytest.approx(found.prefill + found.decode + found.logprobs + found.train + found.optimizer)


def test_one_optimizer_step_needs_no_log_probs_and_a_group_of_one_costs_one_sequence():
    assert compute_limit(MADE, SMALL, SLOW_ARITHMETIC, bytes_per_weight=2, steps=1).logprobs == 0
    assert shared_flops(SMALL, ALONE) == forward_flops(SMALL, [5])
    assert compute_utilization(400.0, 2.0, peak=1000.0) == 0.2  # of the peak


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("some other device", None),
    ],
)
def test_the_peak_performance_of_a_device_is_found_by_its_name(name, peak):
    assert peak_flops(name) == peak


def test_a_server_gets_the_gpu_memory_that_a_resident_trainer_does_not_use():
    # 22 bytes for each of 1,720,574,976 weights and 6 GiB of slack, of 80 GiB.
    left = 80 * 2**30 - 22 * 1_720_574_976 - 6 * 2**30
    assert server_share(80 * 2**30, QWEN3_1_7B) == round(left / (80 * 2**30), 2) == 0.48
    assert server_share(80 * 2**30, TINY) == 0.85
    with pytest.raises(BadInput, match=r"Qwen3-1.7B.*40 GiB"):
        server_share(40 * 2**30, QWEN3_1_7B)


def test_shapes_and_lengths_of_the_benchmarks_are_as_stated():
    assert TINY.head_dim in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512), "vLLM has kernels for these on a CPU"
    for scale in SCALES:
        assert scale.lengths.median_tokens * math.exp(0.8**2 / 2) == pytest.approx(512)
        assert (scale.prompts, scale.group, scale.max_new_tokens) == (256, 8, 2048)
