"""Sampling of tokens: exact if the answer is known, within four standard errors if it is random."""

import math

import numpy as np
import pytest
import torch
from blake3 import blake3

from rheostat.models.config.engines import SamplingConfig
from rheostat.models.engines.sampling import sample_tokens, sample_uniforms
from rheostat.models.records.seeds import derive_seed, sample_seed

HALVES = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def tokens_for(logits_BV, fractions, **settings):
    """Return the tokens that the given uniforms choose."""
    repeated = logits_BV.expand(len(fractions), -1)
    return sample_tokens(repeated, torch.tensor(fractions, dtype=torch.float64), SamplingConfig(**settings))[0].tolist()


@pytest.mark.parametrize(
    ("shares", "settings", "fractions", "tokens"),
    [
        ([0.5, 0.25, 0.125, 0.125], {}, [0, 0.4999, 0.5001, 0.7499, 0.7501, 0.8751, 0.9999], [0, 0, 1, 1, 2, 3, 3]),
        # top 3: 0.5, 0.25 and 0.125 of 0.875, the first two end at 4/7 and 6/7; of equals the lower token is kept
        ([0.5, 0.25, 0.125, 0.125], {"top_k": 3}, [0, 0.571, 0.572, 0.857, 0.858, 0.999], [0, 0, 1, 1, 2, 2]),
        # top p: the fewest tokens that have the mass
        ([0.1, 0.6, 0.3], {"top_p": 0.5}, [0, 0.999], [1, 1]),
        ([0.1, 0.6, 0.3], {"top_p": 0.8}, [0, 0.66, 0.67, 0.999], [1, 1, 2, 2]),
        ([0.1, 0.6, 0.3], {"top_p": 0.95}, [0, 0.59, 0.61, 0.89, 0.91], [1, 1, 2, 2, 0]),
        # top p of the top k: of 0.5 and 0.25 the first has two thirds, which is more than 0.6
        ([0.5, 0.25, 0.125, 0.125], {"top_k": 2, "top_p": 0.6}, [0, 0.999], [0, 0]),
        # temperature 1/2: the squares 16, 4, 1, 1 of 22
        ([0.5, 0.25, 0.125, 0.125], {"temperature": 0.5}, [0.727, 0.728, 0.909, 0.910], [0, 1, 1, 2]),
        ([0.5, 0.25, 0.125, 0.125], {"temperature": 0}, [0.99], [0]),
    ],
)
def test_a_uniform_number_selects_the_token_whose_interval_contains_it(shares, settings, fractions, tokens):
    assert tokens_for(torch.tensor([shares]).log(), fractions, **settings) == tokens


@pytest.mark.parametrize(("temperature", "shares"), [(1.0, [4, 2, 1, 1]), (0.5, [16, 4, 1, 1]), (0.0, [4, 2, 1, 1])])
def test_the_log_prob_is_that_of_the_softmax_with_temperature_and_without_truncation(temperature, shares):
    sampling = SamplingConfig(temperature=temperature, top_k=1)
    tokens_B, logprobs_B = sample_tokens(HALVES, torch.tensor([0.3], dtype=torch.float64), sampling)
    assert tokens_B.tolist() == [0]
    assert logprobs_B.dtype == torch.float32
    assert logprobs_B.item() == pytest.approx(math.log(shares[0] / sum(shares)), abs=1e-6)


def test_a_token_with_probability_0_is_never_sampled_even_at_the_ends_of_the_line():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    assert tokens_for(logits, [0.0, math.nextafter(0.5, 0), 0.5, math.nextafter(1, 0)]) == [1, 1, 3, 3]


def test_frequencies_follow_the_softmax():
    logits_V = torch.linspace(-2, 2, 9)
    shares_V = logits_V.softmax(dim=0).numpy()
    count = 20_000
    tokens = tokens_for(logits_V[None], sample_uniforms(derive_seed("frequencies"), count).tolist())
    found_V = np.bincount(tokens, minlength=9) / count
    assert (np.abs(found_V - shares_V) < 4 * np.sqrt(shares_V * (1 - shares_V) / count)).all()


def test_sampling_a_large_vocabulary_in_pieces_equals_sampling_all_of_it(monkeypatch):
    logits_BV = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    uniforms_B = torch.from_numpy(sample_uniforms(3, 7))
    whole = sample_tokens(logits_BV, uniforms_B, SamplingConfig())
    monkeypatch.setattr("rheostat.models.engines.sampling.MAX_ELEMENTS", 100)
    pieces = sample_tokens(logits_BV, uniforms_B, SamplingConfig())
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_a_longer_stream_begins_with_the_shorter_one_and_stays_below_one():
    assert np.array_equal(sample_uniforms(7, 100)[:10], sample_uniforms(7, 10))
    assert not np.array_equal(sample_uniforms(7, 10), sample_uniforms(8, 10))
    many = sample_uniforms(7, 100_000)
    assert 0 <= many.min() < 1e-3
    assert 1 - 1e-3 < many.max() < 1


def test_streams_never_change_from_version_to_version():
    assert sample_uniforms(1, 2).tolist() == [0.3035680343067586, 0.8487087496857769]
    assert derive_seed("sample", 1, 2) == int.from_bytes(blake3(b"s6:samplei1:1i1:2").digest(length=8), "little")


def test_seeds_distinguish_neighbouring_parts_and_numbers_from_texts():
    ways = [("ab",), ("a", "b"), ("a", "b", ""), ("1",), (1,), (11,), (1, 1), (-1,), ("", "ab"), ("i1:1",)]
    assert len({derive_seed(*parts) for parts in ways}) == len(ways)
    assert all(0 <= derive_seed(*parts) < 2**64 for parts in ways)


def test_every_completion_of_a_run_has_a_different_seed():
    seeds = {
        sample_seed(run, iteration, prompt_row=row, sample=sample)
        for run in range(2)
        for iteration in range(3)
        for row in range(20)
        for sample in range(20)
    }
    assert len(seeds) == 2 * 3 * 20 * 20
