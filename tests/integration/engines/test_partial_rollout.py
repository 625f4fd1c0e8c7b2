"""Completions written over several iterations: cut at a budget, continued with the draws that come next."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import BadInput
from infra.store.shards import ShardRef, read_shard
from infra.store.storage import Store, open_store
from models.config.algorithms import Grpo
from models.config.engines import SamplingConfig
from models.config.reward_terms import RegexReward
from models.config.rewards import ScoringConfig
from models.config.rollout import PartialRollout
from models.engines.protocol import Completion, Request
from models.records.schemas import ROLLOUT_SCHEMA, FinishReason
from models.records.versions import ModelVersion
from models.records.work import CreditWork, RolloutWork, ScoredShard, ScoringWork
from models.workers.scoring import ScoringWorker
from tests.support.engines import MIXED, SAMPLING, engine_of, request
from tests.support.inputs import asking, going_on
from tests.support.policies import CONTEXT, small_tokenizer, write_policy
from tests.support.rollout_workers import example, publish, worker

PARTIAL = PartialRollout(tokens=6, max_staleness=1)


# ---- the engine


def rest_of(asked: Request, begun: list[Completion], budget: int | None = None) -> tuple[Request, list[int]]:
    """Ask for what was cut; also the samples it is about."""
    cut = [sample for sample, part in enumerate(begun) if part.finish_reason is FinishReason.CUT]
    rest = going_on(asked, [begun[sample].tokens for sample in cut], budget=budget)
    return replace(rest, seeds=tuple(asked.seeds[sample] for sample in cut)), cut


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("budget", [1, 7])
def test_a_completion_in_two_pieces_is_the_one_in_one_piece(architecture, budget, tmp_path):
    write_policy(tmp_path, architecture)
    engine = engine_of(tmp_path)
    whole = engine.generate(MIXED, SAMPLING)
    begun = engine.generate([replace(asked, budget=budget) for asked in MIXED], SAMPLING)
    rests = [rest_of(asked, group) for asked, group in zip(MIXED, begun, strict=True)]
    assert any(cut for _, cut in rests)
    ended = engine.generate([rest for rest, _ in rests], SAMPLING)
    for expected, first, (_, cut), second in zip(whole, begun, rests, ended, strict=True):
        for sample, completion in enumerate(expected):
            pieces = [first[sample], *(second[cut.index(sample)] for _ in range(sample in cut))]
            assert sum((piece.tokens for piece in pieces), ()) == completion.tokens
            assert sum((piece.logprobs for piece in pieces), ()) == pytest.approx(completion.logprobs, abs=1e-5)
            assert (pieces[-1].text, pieces[-1].finish_reason) == (completion.text, completion.finish_reason)
            assert len(pieces[0].tokens) <= budget


def test_a_completion_that_ends_with_the_last_token_of_its_budget_is_not_cut(tmp_path):
    write_policy(tmp_path)
    engine = engine_of(tmp_path)
    [group] = engine.generate([request(1, 9, group=64)], SAMPLING)
    stopped = next(c for c in group if c.finish_reason is FinishReason.STOP and len(c.tokens) > 1)
    asked = replace(request(1, 9, group=64), budget=len(stopped.tokens))
    assert stopped in engine.generate([asked], SAMPLING)[0]


def test_the_longest_completion_is_bounded_as_a_whole(tmp_path):
    write_policy(tmp_path, eos_share=1e-6)
    engine = engine_of(tmp_path)
    asked = request(1, 9, group=1)
    [[first]] = engine.generate([replace(asked, budget=20)], SAMPLING)
    [[second]] = engine.generate([going_on(asked, [first.tokens], budget=20)], SAMPLING)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.CUT, FinishReason.LENGTH)
    assert len(first.tokens) + len(second.tokens) == SAMPLING.max_new_tokens
    with pytest.raises(BadInput, match="prompt row 1: a completion of 24 tokens cannot go on, max_new_tokens is 24"):
        engine.generate([going_on(asked, [first.tokens + second.tokens])], SAMPLING)


def test_a_stop_text_may_begin_in_one_piece_and_end_in_the_next(tmp_path):
    write_policy(tmp_path)
    engine = engine_of(tmp_path)
    asked, sampling = request(8, 9, group=1), SamplingConfig(max_new_tokens=40, temperature=0.9)
    [[free]] = engine.generate([asked], sampling)
    stop = sampling.model_copy(update={"stop": (small_tokenizer().decode(free.tokens[3:6]),)})
    [[first]] = engine.generate([replace(asked, budget=5)], stop)
    [[second]] = engine.generate([going_on(asked, [first.tokens])], stop)
    assert (first.tokens, second.tokens) == (free.tokens[:5], free.tokens[5:6])
    assert second.finish_reason is FinishReason.STOP
    assert second.text.endswith(stop.stop[0])


def test_a_row_that_ended_at_the_policys_context_may_wait_for_its_neighbours(tmp_path):
    write_policy(tmp_path, "gpt2", eos_share=1e-6)  # it looks positions up in a table of CONTEXT entries
    engine = engine_of(tmp_path)
    full = request(1, CONTEXT - 24, group=1)
    [[first]] = engine.generate([replace(full, budget=20)], SAMPLING)
    others = [request(row, 9, group=4) for row in (2, 3)]
    together = engine.generate([going_on(full, [first.tokens]), *others], SAMPLING)
    [[alone]] = engine.generate([going_on(full, [first.tokens])], SAMPLING)
    assert together[0][0].tokens == alone.tokens
    assert [group[0].tokens for group in together[1:]] == [
        engine.generate([other], SAMPLING)[0][0].tokens for other in others
    ]


# ---- the worker


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"{tmp_path}/run")


@pytest.fixture
def work(store: Store, tmp_path: Path) -> RolloutWork:
    return example(store, tmp_path / "made")


def following(work: RolloutWork, continued: ShardRef, *, policy: ModelVersion | None = None) -> RolloutWork:
    """Return the work of the next iteration, by another version of the same weights unless a policy is given."""
    policy = policy or replace(work.policy, version=work.policy.version + 1)
    return replace(work, iteration=work.iteration + 1, policy=policy, rows=(), continued=continued)


def rows_of(store: Store, *refs: ShardRef) -> dict[tuple[int, int], dict[str, object]]:
    rows = [row for ref in refs for row in read_shard(store, ref).to_pylist()]
    return {(row["prompt_row"], row["sample"]): row for row in rows}


def test_groups_with_a_cut_completion_come_second_and_whole(store, work, tmp_path):
    outcome = worker(tmp_path).generate(replace(work, partial=PARTIAL, group_size=2))
    assert len(outcome.shards) == 2
    done, cut = (rows_of(store, ref) for ref in outcome.shards)
    assert all(row["finish_reason"] != "cut" and len(row["completion_tokens"]) <= 6 for row in done.values())
    prompts = {prompt for prompt, _ in cut}
    assert all(any(cut[prompt, s]["finish_reason"] == "cut" for s in range(2)) for prompt in prompts)
    assert sorted({*done, *cut}) == [(row, sample) for row in sorted(work.rows) for sample in range(2)]
    assert not prompts & {prompt for prompt, _ in done}
    assert outcome.detail["carried_rows"] == sorted(prompts)
    assert outcome.metrics["groups"] + outcome.metrics["carried_groups"] == len(work.rows)
    assert outcome.metrics["completions"] == len(done)
    assert outcome.metrics["tokens"] == sum(len(row["completion_tokens"]) for row in (done | cut).values())


def test_a_group_that_goes_on_ends_as_if_it_had_never_been_cut(store, work, tmp_path):
    generating = worker(tmp_path)
    whole = rows_of(store, *generating.generate(work).shards)
    first = generating.generate(replace(work, partial=PARTIAL))
    second = generating.generate(following(replace(work, partial=PARTIAL), first.shards[1]))
    assert len(second.shards) == 1
    pieces = rows_of(store, first.shards[0], second.shards[0])
    assert pieces.keys() == whole.keys()
    for name, expected in whole.items():
        found = pieces[name]
        assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-5)
        length = len(expected["completion_tokens"])
        parts = [6, length - 6] if length > 6 else [length]
        assert [segment["tokens"] for segment in found["segments"]] == parts
        assert [segment["policy_version"] for segment in found["segments"]] == [0, 1][: len(parts)]
        for column in ROLLOUT_SCHEMA.names:
            assert column in ("logprobs", "segments") or found[column] == expected[column]


def test_log_probs_are_those_of_the_policy_that_wrote_each_token(store, work, tmp_path):
    generating = worker(tmp_path)
    first = generating.generate(replace(work, partial=PARTIAL))
    other = publish(store, tmp_path / "other", seed=1)
    assert other.version == 1
    second = generating.generate(following(replace(work, partial=PARTIAL), first.shards[1], policy=other))
    before, after = rows_of(store, first.shards[1]), rows_of(store, second.shards[0])
    engine = engine_of(tmp_path / "other")
    for name, row in after.items():
        kept = len(before[name]["completion_tokens"])
        assert row["completion_tokens"][:kept] == before[name]["completion_tokens"]
        assert row["logprobs"][:kept] == before[name]["logprobs"]
        if before[name]["finish_reason"] != "cut":
            assert row == before[name]  # finished before its group was: it is not written again
            continue
        asked = asking(name[0], row["prompt_tokens"], [row["seed"]])
        [[written]] = engine.generate([going_on(asked, [row["completion_tokens"][:kept]])], work.sampling)
        assert tuple(row["completion_tokens"][kept:]) == written.tokens
        assert row["logprobs"][kept:] == pytest.approx(written.logprobs, abs=1e-5)


def test_a_completion_is_cut_again_until_it_is_as_stale_as_it_may_be(store, work, tmp_path):
    generating = worker(tmp_path)
    once = replace(work, partial=PartialRollout(tokens=3, max_staleness=2))
    first = generating.generate(once)
    again = following(once, first.shards[1])
    second = generating.generate(again)
    third = generating.generate(following(again, second.shards[1]))
    assert len(third.shards) == 1
    stale = [row for row in rows_of(store, third.shards[0]).values() if len(row["segments"]) == 3]
    assert stale
    assert all([s["tokens"] for s in row["segments"][:2]] == [3, 3] for row in stale)
    assert all([s["policy_version"] for s in row["segments"]] == [0, 1, 2] for row in stale)


def test_new_groups_may_be_begun_beside_those_that_go_on(store, work, tmp_path):
    generating = worker(tmp_path)
    first = generating.generate(replace(work, partial=PARTIAL))
    begun = set(first.detail["carried_rows"])
    asked = following(replace(work, partial=PARTIAL), first.shards[1])
    outcome = generating.generate(replace(asked, rows=(0, 1)))
    rows = rows_of(store, *outcome.shards)
    assert {prompt for prompt, _ in rows} == {0, 1} | begun
    assert begun <= {prompt for prompt, _ in rows_of(store, outcome.shards[0])}
    for ref in outcome.shards:
        names = [(row["prompt_row"], row["sample"]) for row in read_shard(store, ref).to_pylist()]
        assert names == sorted(names)
    with pytest.raises(BadInput, match=r"different prompt rows beside \[.*\] that go on"):
        generating.generate(replace(asked, rows=(min(begun),)))


def test_where_every_group_is_cut_nothing_is_scored_or_trained(store, work, tmp_path):
    outcome = worker(tmp_path).generate(replace(work, partial=PartialRollout(tokens=2)))
    assert [ref.rows for ref in outcome.shards] == [0, 20]
    assert outcome.metrics["groups"] == 0
    scoring = ScoringWorker(str(tmp_path), "run", ScoringConfig(rewards=(RegexReward(pattern="."),)), Grpo())
    scores = scoring.score(ScoringWork(iteration=3, rollouts=outcome.shards[0], metric="regex")).shards[0]
    shard = ScoredShard(rollouts=outcome.shards[0], scores=scores)
    credit = scoring.credit(CreditWork(iteration=3, shards=(shard,)))
    scoring.close()
    assert credit.shards[0].rows == 0


def test_shards_say_who_wrote_last_and_what_they_go_on_from(store, work, tmp_path):
    generating = worker(tmp_path)
    first = generating.generate(replace(work, partial=PARTIAL))
    asked = following(replace(work, partial=PARTIAL), first.shards[1])
    metadata = read_shard(store, generating.generate(asked).shards[0]).schema.metadata
    assert metadata[b"policy_version"] == b"1"
    assert metadata[b"continued_digest"].decode() == first.shards[1].digest
    assert b"seed_prompt_rows" not in metadata  # its seeds are not those of this iteration
    assert PartialRollout.model_validate_json(metadata[b"partial"]) == PARTIAL
    assert read_shard(store, first.shards[1]).schema.metadata[b"rheostat.kind"] == b"unfinished"


def test_the_same_pieces_have_the_same_digests_in_another_worker(store, work, tmp_path):
    partial = replace(work, partial=PARTIAL)
    first = worker(tmp_path).generate(partial)
    busy = worker(tmp_path)
    busy.generate(following(partial, first.shards[1]))
    assert busy.generate(partial).shards == first.shards
    second = following(partial, first.shards[1])
    assert worker(tmp_path).generate(second).shards == busy.generate(second).shards
