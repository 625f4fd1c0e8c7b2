"""Invariants of a run with waves, surplus groups and partial completions, and reports of broken ones."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from rheostat.infra.store.bundles import publish_bundle
from rheostat.infra.store.manifests import Manifest
from rheostat.infra.store.runs import Run, create_run, open_run
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.models.agents.branches import EpisodeRecord
from rheostat.models.agents.stored_branches import Ending, fill
from rheostat.models.config.algorithms import Grpo
from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.reward_terms import RegexReward
from rheostat.models.config.rewards import ScoringConfig
from rheostat.models.config.rollout import DynamicSampling, PartialRollout, RolloutConfig
from rheostat.models.data.curriculum import DynamicSamplingState, PromptOrder, another_wave, take_rows, wave_size
from rheostat.models.engines.protocol import Completion
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import PROMPT_SCHEMA, FinishReason
from rheostat.models.records.versions import ModelVersion, Outcome, bundles_of, policy_of
from rheostat.models.records.work import CreditWork, RolloutWork, ScoredShard, ScoringWork
from rheostat.models.rollouts.groups import Group, PartialCompletion, build_table
from rheostat.models.workers.rollout import RolloutWorker
from rheostat.models.workers.scoring import ScoringWorker
from rheostat.tasks.run.batch import BatchPlan
from rheostat.tasks.run.iteration import CarryOver, Iteration, carry_over_after
from rheostat.tasks.run.keys import StageKey, iteration_key
from rheostat.tasks.verification.invariants import check_invariants
from tests.support.policies import small_tokenizer, write_policy

DYNAMIC = DynamicSampling(surplus="keep", max_extra_waves=1, margin=1.5)
ROLLOUT = RolloutConfig(
    prompts=5,
    group_size=3,
    shard_prompts=4,
    sampling=SamplingConfig(max_new_tokens=24),
    dynamic=DYNAMIC,
    partial=PartialRollout(tokens=16),
)
SCORING = ScoringConfig(rewards=(RegexReward(pattern="[0-2]"),))
TEXTS = [f"Ana has {n} pens." for n in range(40)]
ITERATIONS = 4
Change = Callable[[Manifest], Manifest]


class Story:
    """Run of real workers without an orchestrator. Its updates do not change the policy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = {"seed": 3, "rollout": ROLLOUT.model_dump(mode="json")}
        self.run = create_run(str(root), "story", config)
        self.rollout = RolloutWorker(str(root), "story", ROLLOUT.engine, 1)
        self.scoring = ScoringWorker(str(root), "story", SCORING, Grpo())
        with self.run.lock():
            self._prepare()
            for number in range(1, ITERATIONS + 1):
                self._iterate(number)
        self.scoring.close()

    def _commit(self, key: str, outcome: Outcome, *parents: Manifest) -> Manifest:
        bundles = {} if outcome.model is None else bundles_of(outcome.model)
        version = {} if outcome.model is None else {"version": outcome.model.version}
        made = Manifest(
            key=key, shards=outcome.shards, bundles=bundles, parents=tuple(parent.digest for parent in parents),
            metrics=outcome.metrics or {}, detail=version | (outcome.detail or {}),
        )  # fmt: skip
        return self.run.commit(made)

    def _prepare(self) -> None:
        store = self.run.store
        write_policy(self.root / "made", eos_share=0.12)
        self.weights = publish_bundle(store, self.root / "made", prefix="policies")
        columns = {
            "prompt_id": [f"{row:016x}" for row in range(len(TEXTS))],
            "text": TEXTS,
            "tokens": [small_tokenizer().encode(text) for text in TEXTS],
            "images": [[]] * len(TEXTS),
            "answer": TEXTS,
            "columns": ["{}"] * len(TEXTS),
            "messages": [None] * len(TEXTS),
        }
        shard = write_shard(store, pa.table(columns, schema=PROMPT_SCHEMA), kind="prompts", metadata={})
        self.prompts = self._commit("prompts/train", Outcome(shards=(shard,)))
        self._commit(StageKey.policy(0), Outcome(model=ModelVersion(version=0, weights=self.weights)))

    def _iterate(self, number: int) -> None:
        before, informative = Iteration(self.run, number).start_state, 0
        kept = [(self._find(g.rollouts), self._find(g.scores), g.rows) for g in before.leftover_groups]
        informative += sum(len(rows) for _, _, rows in kept)
        made: list[tuple[Manifest, Manifest, None]] = []
        wave = 0
        while not wave or another_wave(wave, ROLLOUT.prompts - informative, max_extra_waves=DYNAMIC.max_extra_waves):
            wave += 1
            plan = self._plan(number, wave, before, gap=ROLLOUT.prompts - informative)
            for shard in range(plan.num_shards):
                rollouts, scores = self._shard(plan, shard)
                informative += int(scores.metrics["informative_groups"])
                made.append((rollouts, scores, None))
        shards = [ScoredShard(r.shards[0], s.shards[0], rows) for r, s, rows in (*kept, *made)]
        work = CreditWork(
            iteration=number, shards=tuple(shards), target=ROLLOUT.prompts, dynamic=DYNAMIC, policy_version=number - 1
        )
        looked_at = [manifest for rollouts, scores, _ in (*kept, *made) for manifest in (rollouts, scores)]
        credit = self._commit(f"{iteration_key(number)}/credit", self.scoring.credit(work), *looked_at)
        policy = ModelVersion(version=number, weights=self.weights)
        self._commit(StageKey.policy(number), Outcome(model=policy), self._find(StageKey.policy(number - 1)), credit)
        after = carry_over_after(Iteration(self.run, number), DYNAMIC)
        self._commit(f"{iteration_key(number)}/seal", Outcome(detail={"policy": "", **after.detail()}), credit)

    def _plan(self, number: int, wave: int, before: CarryOver, *, gap: int) -> BatchPlan:
        earlier = [batch.plan for batch in Iteration(self.run, number).batches]
        taken = {*before.rows()}.union(*(plan.rows for plan in earlier))
        carried = tuple(groups.rollouts for groups in before.partial_groups) if wave == 1 else ()
        count = max(0, wave_size(gap, (before.sampling or DynamicSamplingState()).ema, DYNAMIC.margin) - len(carried))
        cursor = earlier[-1].cursor if earlier else before.cursor
        rows, cursor = take_rows(cursor, count, PromptOrder(len(TEXTS), 3), taken=taken)
        plan = BatchPlan(
            key=iteration_key(number, wave), number=number, wave=wave, split="train", rows=rows, carried=carried,
            group_size=ROLLOUT.group_size, shard_prompts=ROLLOUT.shard_prompts, sampling=ROLLOUT.sampling,
            policy=StageKey.policy(number - 1), cursor=cursor,
        )  # fmt: skip
        self._commit(plan.plan_key, Outcome(detail=plan.model_dump(mode="json")))
        return plan

    def _shard(self, plan: BatchPlan, shard: int) -> tuple[Manifest, Manifest]:
        work = RolloutWork(
            iteration=plan.number, policy=ModelVersion(version=plan.number - 1, weights=self.weights),
            prompts=self.prompts.shards[0], rows=plan.shard_rows(shard), group_size=plan.group_size,
            sampling=plan.sampling, seed=3, partial=ROLLOUT.partial,
            continued=self._find(plan.carried[shard]).shards[1] if shard < len(plan.carried) else None,
        )  # fmt: skip
        rollouts = self._commit(plan.shard_key("rollout", shard), self.rollout.generate(work))
        asked = ScoringWork(iteration=plan.number, rollouts=rollouts.shards[0], metric="regex")
        return rollouts, self._commit(plan.shard_key("scoring", shard), self.scoring.score(asked), rollouts)

    def _find(self, key: str) -> Manifest:
        found = self.run.find(key)
        assert found is not None, key
        return found


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("story")
    Story(path)
    return path


@pytest.fixture
def run(root: Path, tmp_path: Path) -> Run:
    """Copy of the run, which a test may damage."""
    shutil.copytree(root / "story", tmp_path / "story")
    return open_run(str(tmp_path), "story")


def spoil(run: Run, key: str, change: Change) -> list[str]:
    """Replace a manifest with a changed one, and return the reported problems."""
    found = run.find(key)
    assert found is not None
    path = run.store.local_path(f"manifests/{key}.json")
    path.chmod(0o644)
    path.write_bytes(change(found).encode())
    return check_invariants(open_run(str(path).split("/story/")[0], "story"))


def detail(**changes: object) -> Change:
    return lambda manifest: manifest.model_copy(update={"detail": {**manifest.detail, **changes}})


def change_rows(run: Run, index: int, change: Callable[[list[dict[str, object]]], object]) -> Change:
    """Change the rows of a manifest's `index`-th shard."""

    def changed(manifest: Manifest) -> Manifest:
        table = read_shard(run.store, manifest.shards[index])
        rows = table.to_pylist()
        change(rows)
        metadata = {
            key.decode(): value.decode()
            for key, value in table.schema.metadata.items()
            if not key.startswith(b"rheostat.")
        }
        plain = pa.Table.from_pylist(rows, schema=table.schema.remove_metadata())
        shards = list(manifest.shards)
        shards[index] = write_shard(run.store, plain, kind="changed", metadata=metadata)
        return manifest.model_copy(update={"shards": tuple(shards)})

    return changed


def cut_shards(run: Run) -> list[str]:
    return [m.key for m in run.manifests() if "/rollout/" in m.key and len(m.shards) == 2]


def seal_with(run: Run, name: str) -> Manifest:
    """Return the first seal, except the last one, that passes groups of this kind on to the next iteration."""
    seals = [run.find(f"{iteration_key(number)}/seal") for number in range(1, ITERATIONS)]
    return next(seal for seal in seals if seal is not None and name in seal.detail)


@pytest.mark.thorough
def test_a_run_with_waves_and_cut_completions_satisfies_all_invariants(run):
    assert check_invariants(run) == []
    assert any("/wave-2/" in manifest.key for manifest in run.manifests())
    assert cut_shards(run)
    seal_with(run, "carried")
    seal_with(run, "kept")


def test_a_skipped_prompt_is_reported(run):
    cursor = run.find("it-0002/seal").detail["cursor"]
    moved = detail(cursor={**cursor, "position": cursor["position"] + 1})
    problems = "\n".join(spoil(run, "it-0002/seal", moved))
    assert "it-0002/seal: the position in the order of prompts is not the one after the last batch" in problems
    assert "it-0003/plan: the prompts are not the" in problems


def test_credit_without_all_scores_of_the_iteration_is_reported(run):
    fewer = spoil(run, "it-0002/credit", lambda m: m.model_copy(update={"parents": m.parents[:-1]}))
    assert (
        "it-0002/credit: the parents are not the iteration's rollouts with their scores and auxiliary scores" in fewer
    )


def test_auxiliary_scores_of_other_completions_than_those_of_the_credit_are_reported(run):
    looked_at = Iteration(run, 2).scored_rollouts().rollouts
    shards = tuple(rollouts.shards[0] for rollouts in looked_at)
    with run.lock():
        run.commit(Manifest(key="it-0002/estimates", shards=(shards[1], *shards[1:-1])))
    problems = check_invariants(run)
    assert f"it-0002/estimates: {len(looked_at) - 1} shards, expected {len(looked_at)}" in problems
    assert f"it-0002/estimates: contains auxiliary scores of completions that are not in {looked_at[0].key}" in problems


def test_cut_groups_that_do_not_continue_are_reported(run):
    seal = seal_with(run, "carried")
    problems = "\n".join(spoil(run, seal.key, detail(carried=[])))
    assert f"{seal.key}: the unfinished groups for the next iteration are not the groups" in problems
    assert "the first shards do not continue the unfinished groups" in problems


def test_kept_groups_that_are_not_surplus_are_reported(run):
    seal = seal_with(run, "kept")
    kept = [{**groups, "rows": [*groups["rows"], 39]} for groups in seal.detail["kept"]]
    assert any("not surplus groups of this iteration" in line for line in spoil(run, seal.key, detail(kept=kept)))


def test_an_inconsistent_state_of_dynamic_sampling_is_reported(run):
    problems = spoil(run, "it-0001/seal", detail(sampling={"ema": 3.0}))
    assert any(line.startswith("it-0001/seal: the state of dynamic sampling is") for line in problems)


def test_a_sample_that_is_trained_twice_or_was_never_finished_is_reported(run):
    twice = change_rows(run, 0, lambda rows: rows.append(rows[0]))
    assert any("is repeated, incomplete or was never finished" in line for line in spoil(run, "it-0002/credit", twice))
    other = change_rows(run, 0, lambda rows: rows[0].update(sample=9))
    assert any("is repeated, incomplete or was never finished" in line for line in spoil(run, "it-0003/credit", other))


def test_a_sample_that_is_too_stale_is_reported(run):
    credit = run.find("it-0004/credit")
    prompt = read_shard(run.store, credit.shards[0])["prompt_row"][0].as_py()
    keys = [m.key for m in run.manifests("it-0004/") if "/rollout/" in m.key]
    key = next(k for k in keys if prompt in read_shard(run.store, run.find(k).shards[0])["prompt_row"].to_pylist())

    def age(rows: list[dict[str, object]]) -> None:
        for row in rows:
            row["segments"] = [{"policy_version": 0, "tokens": len(row["completion_tokens"])}]

    assert any("too old" in line for line in spoil(run, key, change_rows(run, 0, age)))


def test_a_completion_that_does_not_continue_its_earlier_part_is_reported(run):
    key = cut_shards(run)[0]

    def rewrite(rows: list[dict[str, object]]) -> None:
        rows[0]["logprobs"][0] -= 1.0

    assert any("does not continue its earlier part" in line for line in spoil(run, key, change_rows(run, 1, rewrite)))


def test_a_cut_completion_among_finished_groups_is_reported(run):
    cut = change_rows(run, 0, lambda rows: rows[0].update(finish_reason="cut"))
    keys = [m.key for m in run.manifests() if "/rollout/" in m.key and m.shards[0].rows]
    assert any("are not in separate shards" in line for line in spoil(run, keys[0], cut))


def test_segments_that_do_not_match_the_tokens_of_a_completion_are_reported(run):
    keys = [m.key for m in run.manifests() if "/rollout/" in m.key and m.shards[0].rows]
    none = change_rows(run, 0, lambda rows: rows[0]["segments"].append({"policy_version": 9, "tokens": 1}))
    assert any("do not match its tokens" in line for line in spoil(run, keys[0], none))


# ---- episodes of agents

ALL_TURNS = [(None, (5, 6), 0), (None, (7,), 0), (0, (8,), 0), (0, (9, 9), 0), (1, (6,), 1)]
"""Turns of an episode with three branches, as parent, context and version of the policy, which generated one token."""


def write_episode(row: dict[str, object], turns=ALL_TURNS, *, reason: FinishReason = FinishReason.STOP) -> None:
    """Replace a completion by an episode with branches."""
    record = EpisodeRecord()
    for number, (parent, context, version) in enumerate(turns):
        record.open_turn(record.place_after(parent, context), seed=row["seed"])
        record.extend_turn(number, Completion((20 + number,), (-0.5,), "", FinishReason.STOP), version)
    draft = PartialCompletion(seed=row["seed"], input=ModelInput.from_prompt([1]))
    filled = fill(record, draft, Ending(reason), decode=str)
    [made] = build_table([Group(0, "", "", "", (filled,))]).to_pylist()
    names = ("prompt_tokens", "completion_tokens", "logprobs", "segments", "turns", "finish_reason")
    row.update({name: made[name] for name in names})


def finished_shard(run: Run, number: int) -> str:
    """Return the key of a rollout shard of an iteration that contains finished completions."""
    return next(m.key for m in run.manifests(iteration_key(number)) if "/rollout/" in m.key and m.shards[0].rows)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: None, ""),
        (lambda row: row["turns"][-1].update(parent=None), ""),
        (lambda row: row["completion_tokens"].__setitem__(-4, 4), "contradict the tokens and segments of its row"),
        (lambda row: row["turns"][3].update(parent=0), "contradict the tokens and segments of its row"),
        (lambda row: row["segments"][0].update(policy_version=1), "tokens of an older policy than the turn that it"),
    ],
)
def test_branches_that_contradict_the_tree_of_turns_are_reported(run, change, reason):
    def rewrite(rows: list[dict[str, object]]) -> None:
        write_episode(rows[0])
        change(rows[0])

    key = finished_shard(run, 2)
    problems = [line for line in spoil(run, key, change_rows(run, 0, rewrite)) if line.startswith(f"{key}: ")]
    found = [line for line in problems if "do not match its tokens" in line or "turn" in line]
    assert [reason in line for line in found] == ([True] if reason else [])


@pytest.mark.parametrize(
    ("turn", "is_reported"),
    [((0, (8,), 0), False), ((0, (8, 8), 0), True), ((0, (8,), 1), False)],
    ids=["equal", "other context", "sampled again by the present policy"],
)
def test_an_episode_with_branches_must_continue_its_earlier_part(run, turn, is_reported):
    batch, shard = next(
        (batch, shard)
        for number in range(2, ITERATIONS + 1)
        for batch, shard in Iteration(run, number).shards()
        if batch.partial_rollouts(shard) is not None
    )
    earlier = batch.partial_rollouts(shard).key
    cut = read_shard(run.store, run.find(earlier).shards[1]).to_pylist()
    place = next(row for row in cut if row["finish_reason"] == "cut")

    def rewrite(turns, **options: object) -> Callable[[list[dict[str, object]]], None]:
        def change(rows: list[dict[str, object]]) -> None:
            for row in rows:
                if (row["prompt_row"], row["sample"]) == (place["prompt_row"], place["sample"]):
                    write_episode(row, turns, **options)

        return change

    key = batch.plan.shard_key("rollout", shard)
    now = run.find(key)
    index = next(
        index for index, ref in enumerate(now.shards)
        if place["prompt_row"] in read_shard(run.store, ref)["prompt_row"].to_pylist()
    )  # fmt: skip
    spoil(run, earlier, change_rows(run, 1, rewrite(ALL_TURNS[:3], reason=FinishReason.CUT)))
    version = policy_of(batch.policy).version
    later = [*ALL_TURNS[:2], turn, *((parent, context, version) for parent, context, _ in ALL_TURNS[3:])]
    problems = spoil(run, key, change_rows(run, index, rewrite(later)))
    found = [line for line in problems if line.startswith(key) and "does not continue its earlier part" in line]
    assert len(found) == is_reported
