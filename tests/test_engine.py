"""The rollout engine, on small random models."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from infra.bundles import BundleRef
from infra.errors import BadInput, Quarantined
from models.config import SamplingConfig, TransformersEngine
from models.engines import Completion, Request
from models.engines.transformers import HuggingFaceEngine
from models.records import FinishReason, PolicyVersion
from models.seeds import sample_seed
from tests.policies import CONTEXT, small_tokenizer, write_policy

SAMPLING = SamplingConfig(max_new_tokens=24)
EOS = small_tokenizer().eos_token_id


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    write_policy(path)
    return path


@pytest.fixture(scope="module")
def engine(directory) -> HuggingFaceEngine:
    return engine_of(directory)


POLICY = PolicyVersion(version=0, weights=BundleRef(key="policies/d1ge57", digest="d1ge57", bytes=0))


def engine_of(directory: Path, **settings) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(TransformersEngine(**settings))
    engine.load(directory, POLICY)
    return engine


def request(row: int, length: int, group: int = 4) -> Request:
    """A prompt of random tokens, special ones excluded."""
    tokens = np.random.Generator(np.random.Philox(row)).integers(2, 354, size=length)
    seeds = tuple(sample_seed(0, 0, prompt_row=row, sample=sample) for sample in range(group))
    return Request(row=row, tokens=tuple(tokens.tolist()), seeds=seeds)


MIXED = [request(row, length) for row, length in enumerate([30, 7, 19, 7, 41])]


def plain_logprobs(directory: Path, prompt: tuple[int, ...], completion: Completion, temperature: float) -> list[float]:
    """Log-probs of the completion by one forward pass over its own sequence: no cache, no padding, no neighbours."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([prompt + completion.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen_T1 = torch.tensor(completion.tokens)[:, None]
    return (logits_TV / temperature).log_softmax(dim=-1).gather(1, chosen_T1).squeeze(1).tolist()


@contextmanager
def embedded_rows() -> Iterator[list[int]]:
    """How many rows each forward pass had while the block ran."""
    rows: list[int] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            rows.append(len(inputs[0]))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    yield rows
    handle.remove()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt2"])
def test_log_probs_are_those_of_a_plain_forward_pass(architecture, tmp_path):
    write_policy(tmp_path, architecture)
    groups = engine_of(tmp_path).generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0.8))
    assert len({len(completion.tokens) for group in groups for completion in group}) > 3
    for asked, group in zip(MIXED, groups, strict=True):
        for completion in group:
            expected = plain_logprobs(tmp_path, asked.tokens, completion, 0.8)
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_completion_does_not_depend_on_its_neighbours(engine):
    """Tokens are equal and log-probs close: only the last bits of sums may differ with the shape of a batch."""
    together = engine.generate(MIXED, SAMPLING)
    for asked, group in zip(MIXED, together, strict=True):
        for seed, completion in zip(asked.seeds, group, strict=True):
            [[alone]] = engine.generate([Request(row=asked.row, tokens=asked.tokens, seeds=(seed,))], SAMPLING)
            assert alone.tokens == completion.tokens
            assert alone.logprobs == pytest.approx(completion.logprobs, abs=1e-5)


def test_the_same_work_gives_the_same_bits_whatever_was_done_before(directory, engine):
    engine.generate([request(99, 50)], SamplingConfig(max_new_tokens=5))
    assert engine.generate(MIXED, SAMPLING) == engine_of(directory).generate(MIXED, SAMPLING)


def test_a_group_may_be_cut_into_several_batches(directory, engine):
    small = engine_of(directory, max_batch_rows=3)
    with embedded_rows() as rows:
        groups = small.generate(MIXED, SAMPLING)
    assert max(rows) == 3
    for few, many in zip(groups, engine.generate(MIXED, SAMPLING), strict=True):
        assert [completion.tokens for completion in few] == [completion.tokens for completion in many]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_greedy_is_what_transformers_itself_generates(architecture, tmp_path):
    write_policy(tmp_path, architecture, eos_share=0.004)
    groups = engine_of(tmp_path).generate(MIXED, SamplingConfig(max_new_tokens=24, temperature=0))
    assert sum(len(group[0].tokens) for group in groups) > 50
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for asked, group in zip(MIXED, groups, strict=True):
        prompt = torch.tensor([asked.tokens])
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24)
        assert len({completion.tokens for completion in group}) == 1
        assert list(group[0].tokens) == made[0, len(asked.tokens) :].tolist()
        assert group[0].logprobs == pytest.approx(plain_logprobs(tmp_path, asked.tokens, group[0], 1.0), abs=1e-4)


def test_first_tokens_are_as_frequent_as_the_softmax_says(directory, engine):
    asked, count = request(3, 11, group=4000), 4000
    [group] = engine.generate([asked], SamplingConfig(max_new_tokens=1, temperature=0.7))
    with torch.inference_mode():
        logits_V = AutoModelForCausalLM.from_pretrained(directory)(torch.tensor([asked.tokens])).logits[0, -1]
    shares_V = (logits_V / 0.7).softmax(dim=0).double().numpy()
    found_V = np.bincount([completion.tokens[0] for completion in group], minlength=len(shares_V))
    # Pearson's statistic has mean 353 and standard deviation √(2 · 353) where the draws follow the shares.
    statistic = ((found_V - count * shares_V) ** 2 / (count * shares_V)).sum()
    assert abs(statistic - 353) < 4 * (2 * 353) ** 0.5


def test_eos_ends_a_completion_and_belongs_to_it(engine):
    completions = [completion for group in engine.generate(MIXED, SAMPLING) for completion in group]
    stopped = [completion for completion in completions if completion.finish_reason is FinishReason.STOP]
    cut = [completion for completion in completions if completion.finish_reason is FinishReason.LENGTH]
    assert stopped
    assert cut
    assert all(completion.tokens[-1] == EOS and EOS not in completion.tokens[:-1] for completion in stopped)
    assert all(len(completion.tokens) == 24 and EOS not in completion.tokens for completion in cut)
    assert all(len(completion.logprobs) == len(completion.tokens) for completion in completions)
    assert all(
        completion.text == small_tokenizer().decode(completion.tokens, skip_special_tokens=True)
        for completion in completions
    )


def test_a_stop_text_ends_a_completion_at_the_token_that_completes_it(directory, engine):
    [[free]] = engine.generate([request(8, 9, group=1)], SamplingConfig(max_new_tokens=40, temperature=0.9))
    stop = small_tokenizer().decode(free.tokens[3:6])
    sampling = SamplingConfig(max_new_tokens=40, temperature=0.9, stop=("never said", stop))
    [[stopped]] = engine.generate([request(8, 9, group=1)], sampling)
    assert len(free.tokens) > 6
    assert stopped.tokens == free.tokens[:6]
    assert stopped.text.endswith(stop)
    assert stopped.finish_reason is FinishReason.STOP


def test_finished_rows_leave_the_batch(engine):
    work = [request(row, 10, group=8) for row in range(8)]
    with embedded_rows() as rows:
        completions = [completion for group in engine.generate(work, SAMPLING) for completion in group]
    longest = max(len(completion.tokens) for completion in completions)
    alive = [sum(len(completion.tokens) > step for completion in completions) for step in range(1, longest)]
    assert rows[0] == 8  # each prompt is prefilled once for its group
    assert len(rows) == longest
    assert all(left <= decoded <= left / 0.75 for left, decoded in zip(alive, rows[1:], strict=True))
    assert alive[-1] < 0.75 * 64


def test_progress_moves_with_every_step(directory):
    engine = engine_of(directory)
    before = engine.progress
    assert before > 0
    engine.generate([request(1, 5)], SamplingConfig(max_new_tokens=1))
    assert engine.progress == before + 1


def test_weights_that_are_not_numbers_are_refused_by_name(directory, tmp_path):
    write_policy(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"][17] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Quarantined, match=r"policy d1ge57.*prompt row 1, sample 0"):
        engine_of(tmp_path).generate(MIXED, SAMPLING)


def test_a_prompt_that_leaves_no_room_is_refused_with_its_lengths(engine):
    engine.generate([request(6, CONTEXT - 2)], SamplingConfig(max_new_tokens=2))
    with pytest.raises(BadInput, match=f"prompt row 6: {CONTEXT - 2} prompt tokens and max_new_tokens 3 .* {CONTEXT}"):
        engine.generate([request(6, CONTEXT - 2)], SamplingConfig(max_new_tokens=3))
    with pytest.raises(BadInput, match="prompt row 6: expected at least one token"):
        engine.generate([request(6, 0)], SamplingConfig(max_new_tokens=3))


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_pickled_weights_are_never_opened(tmp_path):
    write_policy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Trap(str(tmp_path / "sprung"))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInput):
        engine_of(tmp_path)
    assert not (tmp_path / "sprung").exists()
