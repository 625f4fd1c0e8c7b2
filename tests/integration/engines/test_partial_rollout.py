"""Completions that are cut at a budget of tokens and continue in a later iteration."""

from dataclasses import replace
from pathlib import Path

import pytest

from rheostat.infra.errors import BadInput
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.reward_terms import RegexReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import PartialRollout
from rheostat.models.engines.protocol import Completion, Request
from rheostat.models.records.schemas import FinishReason
from rheostat.models.records.versions import Outcome
from rheostat.models.records.work import CreditWork, RolloutWork, ScoredShard, ScoringWork
from rheostat.models.workers.scoring import ScoringWorker
from tests.support.engines import MIXED, SAMPLING, engine_of, request
from tests.support.episodes import index_rows, require_equal_rows
from tests.support.inputs import request_completions, request_continuations
from tests.support.policies import CONTEXT, write_policy
from tests.support.rollout_workers import example, publish, worker

PARTIAL = PartialRollout(tokens=6, max_staleness=1)


# ---- the engine


def continue_cut(request: Request, group: list[Completion]) -> tuple[Request, list[int]]:
    """Return the request that continues the cut completions of a group, and the samples of these completions."""
    cut = [sample for sample, part in enumerate(group) if part.finish_reason is FinishReason.CUT]
    rest = request_continuations(request, [group[sample].tokens for sample in cut])
    return replace(rest, seeds=tuple(request.seeds[sample] for sample in cut)), cut


@pytest.mark.thorough_after(1)
@pytest.mark.parametrize(
    ("architecture", "budget", "settings"),
    [
        *((architecture, budget, {}) for architecture in ("llama", "mistral", "gpt2") for budget in (1, 7)),
        ("llama", 5, {"max_batch_rows": 4}),
        ("mistral", 5, {"max_batch_rows": 4}),
    ],
)
def test_a_completion_in_two_pieces_equals_the_completion_in_one_piece(architecture, budget, settings, tmp_path):
    write_policy(tmp_path, architecture)
    engine, whole = engine_of(tmp_path, **settings), engine_of(tmp_path).generate(MIXED, SAMPLING)
    begun = engine.generate([replace(prompt, budget=budget) for prompt in MIXED], SAMPLING)
    rests = [continue_cut(prompt, group) for prompt, group in zip(MIXED, begun, strict=True)]
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
    prompt = replace(request(1, 9, group=64), budget=len(stopped.tokens))
    assert stopped in engine.generate([prompt], SAMPLING)[0]


def test_max_new_tokens_limits_all_pieces_of_a_completion_together(tmp_path):
    write_policy(tmp_path, eos_share=1e-6)
    engine = engine_of(tmp_path)
    prompt = request(1, 9, group=1)
    [[first]] = engine.generate([replace(prompt, budget=20)], SAMPLING)
    [[second]] = engine.generate([request_continuations(prompt, [first.tokens], budget=20)], SAMPLING)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.CUT, FinishReason.LENGTH)
    assert len(first.tokens) + len(second.tokens) == SAMPLING.max_new_tokens
    with pytest.raises(BadInput, match=r"prompt row 1: .*24 tokens, .*max_new_tokens.* 24"):
        engine.generate([request_continuations(prompt, [first.tokens + second.tokens])], SAMPLING)


def test_a_row_that_ended_at_the_end_of_the_context_waits_for_the_other_rows(tmp_path):
    write_policy(tmp_path, "gpt2", eos_share=1e-6)  # its table of positions has CONTEXT entries
    engine = engine_of(tmp_path)
    full = request(1, CONTEXT - 24, group=1)
    [[first]] = engine.generate([replace(full, budget=20)], SAMPLING)
    others = [request(row, 9, group=4) for row in (2, 3)]
    together = engine.generate([request_continuations(full, [first.tokens]), *others], SAMPLING)
    [[alone]] = engine.generate([request_continuations(full, [first.tokens])], SAMPLING)
    assert together[0][0].tokens == alone.tokens
    assert [group[0].tokens for group in together[1:]] == [
        engine.generate([other], SAMPLING)[0][0].tokens for other in others
    ]


# ---- the worker


class Iterations:
    """A store with the work of one iteration and its outcome, in which most groups have a cut completion."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.store = open_store(f"{home}/run")
        self.whole = example(self.store, home / "made")
        self.work = replace(self.whole, partial=PARTIAL)
        self.first = worker(home).generate(self.work)

    def following(self, work: RolloutWork, first: Outcome, **changes: object) -> RolloutWork:
        """Return the work that continues an iteration, by the next version of the same weights."""
        following = replace(
            work,
            iteration=work.iteration + 1,
            policy=replace(work.policy, version=work.policy.version + 1),
            rows=(),
            continued=first.shards[1],
        )
        return replace(following, **changes)

    def rows(self, *shards: ShardRef) -> dict[tuple[int, int], dict[str, object]]:
        return index_rows([row for shard in shards for row in read_shard(self.store, shard).to_pylist()])


@pytest.fixture(scope="module")
def iterations(tmp_path_factory: pytest.TempPathFactory) -> Iterations:
    """Iterations that the tests of the worker share."""
    return Iterations(tmp_path_factory.mktemp("iterations"))


def test_groups_with_a_cut_completion_are_whole_in_the_second_shard(iterations):
    outcome = worker(iterations.home).generate(replace(iterations.work, group_size=2))
    assert len(outcome.shards) == 2
    done, cut = map(iterations.rows, outcome.shards)
    assert all(row["finish_reason"] != "cut" and len(row["completion_tokens"]) <= 6 for row in done.values())
    prompts = {prompt for prompt, _ in cut}
    assert all(any(cut[prompt, sample]["finish_reason"] == "cut" for sample in range(2)) for prompt in prompts)
    assert sorted({*done, *cut}) == [(row, sample) for row in sorted(iterations.work.rows) for sample in range(2)]
    assert not prompts & {prompt for prompt, _ in done}
    assert outcome.detail["carried_rows"] == sorted(prompts)
    assert outcome.metrics["groups"] + outcome.metrics["carried_groups"] == len(iterations.work.rows)
    assert outcome.metrics["completions"] == len(done)
    assert outcome.metrics["tokens"] == sum(len(row["completion_tokens"]) for row in (done | cut).values())


def test_a_group_that_continues_ends_like_one_that_was_never_cut(iterations):
    generating = worker(iterations.home)
    whole = iterations.rows(*generating.generate(iterations.whole).shards)
    second = generating.generate(iterations.following(iterations.work, iterations.first))
    assert len(second.shards) == 1
    pieces = iterations.rows(iterations.first.shards[0], second.shards[0])
    assert pieces.keys() == whole.keys()
    require_equal_rows([pieces[name] for name in whole], [*whole.values()], "segments")
    for row in pieces.values():
        length = len(row["completion_tokens"])
        lengths = [6, length - 6] if length > 6 else [length]
        segments = [(segment["policy_version"], segment["tokens"]) for segment in row["segments"]]
        assert segments == [*enumerate(lengths)]


def test_recorded_log_probs_are_those_of_the_policy_that_generated_each_token(iterations):
    other = publish(iterations.store, iterations.home / "other", seed=1)
    assert other.version == 1
    second = worker(iterations.home).generate(iterations.following(iterations.work, iterations.first, policy=other))
    before, after = iterations.rows(iterations.first.shards[1]), iterations.rows(second.shards[0])
    engine = engine_of(iterations.home / "other")
    for name, row in after.items():
        kept = len(before[name]["completion_tokens"])
        assert row["completion_tokens"][:kept] == before[name]["completion_tokens"]
        assert row["logprobs"][:kept] == before[name]["logprobs"]
        if before[name]["finish_reason"] != "cut":
            assert row == before[name]  # it ended before its group did, and is not generated again
            continue
        prompt = request_completions(name[0], row["prompt_tokens"], [row["seed"]])
        [[rest]] = engine.generate(
            [request_continuations(prompt, [row["completion_tokens"][:kept]])], iterations.work.sampling
        )
        assert tuple(row["completion_tokens"][kept:]) == rest.tokens
        assert row["logprobs"][kept:] == pytest.approx(rest.logprobs, abs=1e-5)


def test_a_completion_is_cut_again_until_it_reaches_the_largest_staleness(iterations):
    generating = worker(iterations.home)
    work = replace(iterations.whole, partial=PartialRollout(tokens=3, max_staleness=2))
    outcome = generating.generate(work)
    for _ in range(2):
        work = iterations.following(work, outcome)
        outcome = generating.generate(work)
    assert len(outcome.shards) == 1
    stale = [row["segments"] for row in iterations.rows(*outcome.shards).values() if len(row["segments"]) == 3]
    assert stale
    assert all([segment["tokens"] for segment in segments[:2]] == [3, 3] for segments in stale)
    assert all([segment["policy_version"] for segment in segments] == [0, 1, 2] for segments in stale)


def test_an_iteration_may_begin_new_groups_next_to_those_that_continue(iterations):
    generating = worker(iterations.home)
    begun = set(iterations.first.detail["carried_rows"])
    work = iterations.following(iterations.work, iterations.first, rows=(0, 1))
    outcome = generating.generate(work)
    assert {prompt for prompt, _ in iterations.rows(*outcome.shards)} == {0, 1} | begun
    assert begun <= {prompt for prompt, _ in iterations.rows(outcome.shards[0])}
    for shard in outcome.shards:
        names = [*iterations.rows(shard)]
        assert names == sorted(names)
    with pytest.raises(BadInput, match=r"no row twice .*continued rows \[.*\], but it lists \(\d+,\)"):
        generating.generate(replace(work, rows=(min(begun),)))


def test_an_iteration_with_only_cut_groups_scores_and_trains_nothing(iterations):
    outcome = worker(iterations.home).generate(replace(iterations.whole, partial=PartialRollout(tokens=2)))
    assert [shard.rows for shard in outcome.shards] == [0, 20]
    assert outcome.metrics["groups"] == 0
    scoring = ScoringWorker(str(iterations.home), "run", ScoringConfig(rewards=(RegexReward(pattern="."),)), Grpo())
    scores = scoring.score(ScoringWork(iteration=3, rollouts=outcome.shards[0], metric="regex")).shards[0]
    credit = scoring.credit(CreditWork(iteration=3, shards=(ScoredShard(outcome.shards[0], scores),)))
    scoring.close()
    assert credit.shards[0].rows == 0


def test_the_metadata_of_a_shard_name_its_last_policy_and_the_shard_that_it_continues(iterations):
    second = worker(iterations.home).generate(iterations.following(iterations.work, iterations.first))
    metadata = read_shard(iterations.store, second.shards[0]).schema.metadata
    assert metadata[b"policy_version"] == b"1"
    assert metadata[b"continued_digest"].decode() == iterations.first.shards[1].digest
    assert b"seed_prompt_rows" not in metadata  # the seeds are those of an earlier iteration
    assert PartialRollout.model_validate_json(metadata[b"partial"]) == PARTIAL
    unfinished = read_shard(iterations.store, iterations.first.shards[1]).schema.metadata
    assert unfinished[b"rheostat.kind"] == b"unfinished"


def test_pieces_have_equal_digests_in_another_worker(iterations):
    second = iterations.following(iterations.work, iterations.first)
    other = worker(iterations.home)
    other.generate(second)
    assert other.generate(iterations.work).shards == iterations.first.shards
    assert worker(iterations.home).generate(second).shards == other.generate(second).shards
