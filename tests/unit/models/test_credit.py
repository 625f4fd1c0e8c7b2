"""From rollout, score and estimate tables to training samples."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from infra.errors import BadInput, Damaged
from models.config.algorithms import (
    AlgorithmConfig,
    Capo,
    DistillationOnly,
    DrGrpo,
    Grpo,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RewardKl,
)
from models.config.teachers import Distillation, TeacherDirectory
from models.credit.assign import BAD_ESTIMATES, Credit, CreditRule, credit_completions
from models.credit.inputs import TermColumns
from models.credit.selection import GroupQuota, informative_prompts
from models.records.schemas import ESTIMATE_SCHEMA, ROLLOUT_SCHEMA, score_schema

OUTCOME = TermColumns("numeric", 2.0)
STEPS = TermColumns("steps", 1.0, is_process=True)
TEACHER = Distillation(teacher=TeacherDirectory(path="teacher"))
Spans = tuple[list[int], list[float]]


class Tables:
    """One pair of tables and their estimates: a prompt token, and as many completion tokens as the lengths say."""

    def __init__(
        self, rewards: Sequence[float | None], lengths: Sequence[int], prompts: Sequence[int] | None = None
    ) -> None:
        self.lengths, self.prompts = lengths, prompts or [0] * len(rewards)
        self.rollouts = [
            {
                "prompt_row": prompt,
                "sample": row,
                "prompt_tokens": [7],
                "completion_tokens": list(range(length)),
                "logprobs": [-1.0] * length,
                "finish_reason": "stop",
                "segments": [{"policy_version": 5, "tokens": length}],
            }
            for row, (prompt, length) in enumerate(zip(self.prompts, lengths, strict=True))
        ]
        self.scores = [
            {"prompt_row": prompt, "sample": row, "reward": reward, "reward_numeric": reward, "error": None}
            for row, (prompt, reward) in enumerate(zip(self.prompts, rewards, strict=True))
        ]
        self.estimates = [{"prompt_row": prompt, "sample": row} for row, prompt in enumerate(self.prompts)]

    def with_steps(self, *spans: Spans) -> "Tables":
        for score, (starts, values) in zip(self.scores, spans, strict=True):
            score |= {"reward_steps": min(values), "spans_steps": starts, "values_steps": values}
            score["reward"] = 2 * score["reward_numeric"] + score["reward_steps"]
        return self

    def estimated(self, **columns: Sequence[Sequence[float]]) -> "Tables":
        for name, rows in columns.items():
            for estimate, values in zip(self.estimates, rows, strict=True):
                estimate[name] = values
        return self

    def rollout_table(self) -> pa.Table:
        return pa.Table.from_pylist(self.rollouts, ROLLOUT_SCHEMA)

    def score_table(self) -> pa.Table:
        process = ("steps",) if "reward_steps" in self.scores[0] else ()
        return pa.Table.from_pylist(self.scores, score_schema(("numeric", *process), process))

    def credit(self, algorithm: AlgorithmConfig, **settings: object) -> Credit:
        terms = (OUTCOME, STEPS) if "reward_steps" in self.scores[0] else (OUTCOME,)
        rule = CreditRule(**{"terms": terms, "algorithm": algorithm, "policy_version": 5} | settings)
        estimates = [pa.Table.from_pylist(self.estimates, ESTIMATE_SCHEMA)] if len(self.estimates[0]) > 2 else []
        return credit_completions([self.rollout_table()], [self.score_table()], rule, estimates=estimates)


def advantages(credit: Credit) -> list[list[float]]:
    return credit.samples["advantages"].to_pylist()


# ---- who wrote the tokens


def test_staleness_counts_the_versions_between_writer_and_learner():
    tables = Tables([1, 0], [3, 2])
    tables.rollouts[0]["segments"] = [
        {"policy_version": 3, "tokens": 1}, {"policy_version": 4, "tokens": 0}, {"policy_version": 5, "tokens": 2},
    ]  # fmt: skip
    assert tables.credit(Grpo()).samples["staleness"].to_pylist() == [[2, 0, 0], [0, 0]]
    assert tables.credit(Grpo(), policy_version=6).samples["staleness"].to_pylist() == [[3, 1, 1], [1, 1]]


def test_segments_that_do_not_add_up_to_the_completion_are_refused():
    tables = Tables([1, 0], [3, 2])
    tables.rollouts[1]["segments"] = [{"policy_version": 5, "tokens": 1}]
    with pytest.raises(Damaged, match="rollout 1: expected segments of 2 tokens in all, found 1"):
        tables.credit(Grpo())


def test_tokens_of_a_policy_that_is_yet_to_come_are_refused():
    with pytest.raises(Damaged, match="expected tokens of policies up to 4, found some of 5"):
        Tables([1, 0], [3, 2]).credit(Grpo(), policy_version=4)


# ---- what models say


def test_ppo_hands_on_values_and_returns_in_the_order_of_samples():
    # γ = λ = 1: advantages are what follows less the value; the second table's prompt comes first
    tables = Tables([1, 0], [1, 2], [4, 3]).estimated(values=[[0.25], [0.5, -0.5]])
    samples = tables.credit(Ppo(lam=1, whiten=False)).samples
    assert samples.select(["prompt_row", "advantages", "values", "returns"]).to_pydict() == {
        "prompt_row": [3, 4],
        "advantages": [[-0.5, 0.5], [1.75]],
        "values": [[0.5, -0.5], [0.25]],
        "returns": [[0, 0], [2]],
    }


def test_divergence_in_the_reward_is_measured_against_the_reference():
    tables = Tables([1, 0], [2, 1]).estimated(reference=[[-1.5, -1.5], [-1.25]])
    found = tables.credit(DrGrpo(kl=RewardKl(kind="k1")), kl_coefficient=1)
    # totals as scored (1, 0) less (1, 0.25): 0 and -0.25
    assert advantages(found) == [[0.125, 0.125], [-0.125]]
    assert found.metrics["kl"] == pytest.approx(1.25 / 3)
    assert found.metrics["kl_coefficient"] == 1


def test_a_completion_of_which_a_model_says_no_number_is_missing_and_counted():
    tables = Tables([1, 0, 1], [1, 1, 1]).estimated(reference=[[-1.0], [-1.0], [float("nan")]])
    found = tables.credit(DrGrpo(kl=RewardKl(kind="k1")))
    assert found.samples["sample"].to_pylist() == [0, 1]
    assert (found.metrics["bad_estimates"], found.metrics["missing"]) == (1, 1)
    assert found.errors == {BAD_ESTIMATES: 1}


def test_estimates_of_other_completions_or_of_other_lengths_are_refused():
    tables = Tables([1, 0], [2, 1]).estimated(reference=[[-1.0, -1.0], [-1.0]])
    tables.estimates[1]["sample"] = 9
    with pytest.raises(Damaged, match="2 rollouts and 2 estimates: their sample differ"):
        tables.credit(Grpo(kl=RewardKl()))
    tables = Tables([1, 0], [2, 1]).estimated(reference=[[-1.0], [-1.0]])
    with pytest.raises(Damaged, match="one number of 'reference' per completion token"):
        tables.credit(Grpo(kl=RewardKl()))


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Ppo(), "values, found reference"),
        (DistillationOnly(distillation=TEACHER), "policy, teacher, found reference"),
    ],
    ids=["ppo", "distillation"],
)
def test_an_algorithm_whose_estimates_nobody_made_is_refused(algorithm: AlgorithmConfig, expected: str):
    tables = Tables([1, 0], [1, 1]).estimated(reference=[[-1.0], [-1.0]])
    with pytest.raises(BadInput, match=f"algorithm '{algorithm.kind}': expected estimates of {expected}"):
        tables.credit(algorithm)


# ---- steps


def test_capo_reads_flagged_steps_and_ignores_their_aggregate():
    # tokens earn (2, 2, 1 | 0, -1) as in the test of the algorithm
    tables = Tables([1, 0], [3, 2]).with_steps(([0, 2], [0.0, -1.0]), ([0, 1], [0.0, -1.0]))
    expected = np.array([1.2, 1.2, 0.2, -0.8, -1.8]) / np.sqrt(6.8 / 5)
    np.testing.assert_allclose(np.concatenate(advantages(tables.credit(Capo()))), expected, rtol=1e-6)


def test_algorithms_of_whole_completions_take_the_aggregate_of_steps():
    tables = Tables([1, 1], [3, 2]).with_steps(([0, 2], [0.0, -1.0]), ([0, 1], [0.0, 0.0]))
    assert advantages(tables.credit(DrGrpo())) == [[-0.5] * 3, [0.5] * 2]


@pytest.mark.parametrize(
    ("starts", "values"), [([1], [0.0]), ([0, 2, 2], [0.0] * 3), ([0, 3], [0.0] * 2), ([], [])], ids=str
)
def test_spans_that_do_not_fit_the_tokens_are_refused(starts: list[int], values: list[float]):
    tables = Tables([1, 0], [3, 2]).with_steps(([0], [0.0]), ([0], [0.0]))
    tables.scores[0] |= {"spans_steps": starts, "values_steps": values}
    with pytest.raises(Damaged, match=r"spans of 'steps': expected ascending starts .* prompt row 0, sample 0"):
        tables.credit(Capo())


def test_spans_with_other_numbers_of_values_are_refused():
    tables = Tables([1, 0], [3, 2]).with_steps(([0], [0.0]), ([0], [0.0]))
    tables.scores[0]["values_steps"] = [0.0, 1.0]
    with pytest.raises(Damaged, match="spans of 'steps': expected one finite value per span"):
        tables.credit(Capo())


def test_an_all_correct_group_with_flagged_steps_survives_dynamic_sampling_under_capo():
    tables = Tables([1, 1, 1, 1, 1, 0], [3, 2, 2, 2, 2, 2], [0, 0, 1, 1, 2, 2]).with_steps(
        ([0, 2], [0.0, -1.0]), *[([0], [0.0])] * 5
    )
    wanted = GroupQuota(target=3, metric="numeric", fill=False)
    for algorithm, expected in ((Capo(), [0, 2]), (Grpo(), [2])):
        found = tables.credit(algorithm, wanted=wanted)
        assert sorted(set(found.samples["prompt_row"].to_pylist())) == expected
        assert found.metrics["shortfall_groups"] == 3 - len(expected)
        assert informative(tables, algorithm) == expected  # what waves count is what credit finds


def informative(tables: Tables, algorithm: AlgorithmConfig) -> list[int]:
    terms = (OUTCOME, STEPS)
    return informative_prompts(
        tables.rollout_table(), tables.score_table(), terms=terms, algorithm=algorithm, metric="numeric"
    )


def test_steps_that_tell_only_what_an_environment_wrote_apart_make_no_group_informative():
    tables = Tables([1, 1], [4, 4]).with_steps(([0, 2], [0.0, -1.0]), ([0, 2], [0.0, 0.0]))
    assert informative(tables, Capo()) == [0]
    for rollout in tables.rollouts:
        rollout["segments"] = [{"policy_version": 5, "tokens": 2}, {"policy_version": -1, "tokens": 2}]
    assert informative(tables, Capo()) == []
    wanted = GroupQuota(target=1, metric="numeric", fill=False)
    assert tables.credit(Capo(), wanted=wanted).metrics["informative_groups"] == 0


# ---- who is trained


def test_truncated_completions_are_left_out_of_the_loss_and_stay_in_the_baseline():
    tables = Tables([3, 0, 0], [2, 1, 4])
    tables.rollouts[2]["finish_reason"] = "length"
    found = tables.credit(DrGrpo(mask_truncated=True))
    assert advantages(found) == [[2, 2], [-1], []]
    for name in ("logprobs", "staleness"):
        assert [len(row) for row in found.samples[name].to_pylist()] == [2, 1, 0]
    assert [len(row) for row in found.samples["tokens"].to_pylist()] == [3, 2, 1]
    assert found.metrics["masked"] == 1
    assert advantages(tables.credit(DrGrpo())) == [[2, 2], [-1], [-1] * 4]


def test_masking_empties_what_the_critic_learns_too():
    tables = Tables([3, 0], [2, 1]).estimated(values=[[0.0, 0.0], [0.0]])
    tables.rollouts[1]["finish_reason"] = "length"
    samples = tables.credit(Ppo(mask_truncated=True)).samples
    assert [len(row) for row in samples["returns"].to_pylist()] == [2, 0]
    assert [len(row) for row in samples["values"].to_pylist()] == [2, 0]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Grpo(), []),
        (Grpo(keep_uninformative=True), [0, 1]),
        (Grpo(distillation=TEACHER), [0, 1]),
        (ReinforcePlusPlusBaseline(), []),
        (Capo(), []),
        (ReinforcePlusPlus(kl=None), [0, 1]),
        (Ppo(), [0, 1]),
        (DistillationOnly(distillation=TEACHER), [0, 1]),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_groups_of_equal_rewards_are_kept_where_they_may_teach(algorithm: AlgorithmConfig, expected: list[int]):
    nothing = [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    tables = Tables([1, 1, None], [2, 2, 2]).estimated(policy=nothing, teacher=nothing, values=nothing)
    assert tables.credit(algorithm).samples["sample"].to_pylist() == expected


def test_a_batch_is_normalised_over_the_groups_that_dynamic_sampling_trains():
    tables = Tables([1, 0, 100, 0], [1, 1, 1, 1], [0, 0, 1, 1])
    found = tables.credit(ReinforcePlusPlus(kl=None), wanted=GroupQuota(target=1, metric="numeric", fill=False))
    assert advantages(found) == [[1], [-1]]
    assert found.surplus == ((1,),)
