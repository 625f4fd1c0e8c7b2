"""Training samples computed from rollouts, scores and per-token estimates of models."""

import numpy as np
import pyarrow as pa
import pytest

from rheostat.infra.errors import BadInput, Damaged
from rheostat.models.config.algorithms import (
    Capo,
    DistillationOnly,
    DrGrpo,
    Grpo,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    RewardKl,
)
from rheostat.models.config.teachers import Distillation, TeacherDirectory
from rheostat.models.credit.assign import BAD_ESTIMATES, CreditRule, credit_completions
from rheostat.models.credit.inputs import TermColumns
from rheostat.models.credit.selection import GroupQuota, informative_prompts
from rheostat.models.records.schemas import ESTIMATE_SCHEMA, ROLLOUT_SCHEMA, TERM_REWARD, score_schema

OUTCOME = TermColumns("numeric", 2.0)
STEPS = TermColumns("steps", 1.0, is_process=True)
TEACHER = Distillation(teacher=TeacherDirectory(path="teacher"))


class Tables:
    """Rollouts with one prompt token and completions of these lengths, their scores and their estimates."""

    def __init__(self, rewards, lengths, prompts=None):
        prompts = prompts or [0] * len(rewards)
        keys = [{"prompt_row": prompt, "sample": row} for row, prompt in enumerate(prompts)]
        self.rollouts = [
            key
            | {"prompt_tokens": [7], "completion_tokens": list(range(length)), "logprobs": [-1.0] * length}
            | {"finish_reason": "stop", "segments": [{"policy_version": 5, "tokens": length}]}
            for key, length in zip(keys, lengths, strict=True)
        ]
        self.scores = [
            key | {"reward": reward, "reward_numeric": reward, "error": None}
            for key, reward in zip(keys, rewards, strict=True)
        ]
        self.estimates = [dict(key) for key in keys]

    def with_steps(self, *spans):
        """Add the starts and values of steps to each score."""
        for score, (starts, values) in zip(self.scores, spans, strict=True):
            score |= {"reward_steps": min(values), "spans_steps": starts, "values_steps": values}
            score["reward"] = 2 * score["reward_numeric"] + score["reward_steps"]
        return self

    def with_estimates(self, **columns):
        for name, rows in columns.items():
            for estimate, values in zip(self.estimates, rows, strict=True):
                estimate[name] = values
        return self

    @property
    def terms(self):
        return (OUTCOME, STEPS) if "reward_steps" in self.scores[0] else (OUTCOME,)

    def build_rollouts(self):
        return pa.Table.from_pylist(self.rollouts, ROLLOUT_SCHEMA)

    def build_scores(self):
        process = tuple(term.name for term in self.terms if term.is_process)
        return pa.Table.from_pylist(self.scores, score_schema(("numeric", *process), process))

    def credit(self, algorithm, **settings):
        rule = CreditRule(**{"terms": self.terms, "algorithm": algorithm, "policy_version": 5} | settings)
        estimates = [pa.Table.from_pylist(self.estimates, ESTIMATE_SCHEMA)] if len(self.estimates[0]) > 2 else []
        return credit_completions([self.build_rollouts()], [self.build_scores()], rule, auxiliary_scores=estimates)

    def find_informative_prompts(self, algorithm):
        options = {"terms": self.terms, "algorithm": algorithm, "metric": "numeric"}
        return informative_prompts(self.build_rollouts(), self.build_scores(), **options)


def advantages_of(credit):
    return credit.samples["advantages"].to_pylist()


def lengths_of(credit, column):
    return [len(row) for row in credit.samples[column].to_pylist()]


def test_staleness_counts_the_versions_since_the_policy_that_generated_a_token():
    tables = Tables([1, 0], [3, 2])
    tables.rollouts[0]["segments"] = [
        {"policy_version": version, "tokens": tokens} for version, tokens in ((3, 1), (4, 0), (5, 2))
    ]
    assert tables.credit(Grpo()).samples["staleness"].to_pylist() == [[2, 0, 0], [0, 0]]
    assert tables.credit(Grpo(), policy_version=6).samples["staleness"].to_pylist() == [[3, 1, 1], [1, 1]]


KL = Grpo(kl=RewardKl())
BAD_STARTS = r"'steps': .*ascend.*prompt row 0, sample 0"


@pytest.mark.parametrize(
    ("table", "row", "changes", "algorithm", "message"),
    [
        (
            "rollouts",
            1,
            {"segments": [{"policy_version": 5, "tokens": 1}]},
            Grpo(),
            r"row 1 .* 2 tokens.* 1 token in total",
        ),
        ("rollouts", 1, {"segments": [{"policy_version": 6, "tokens": 2}]}, Grpo(), r"version 6.* version 5"),
        ("estimates", 1, {"sample": 9}, KL, r"2 rows and its estimates with 2 rows .*sample"),
        ("estimates", 0, {"reference": [-1.0]}, KL, r"'reference' .* must have one number for each token"),
        ("scores", 0, {"spans_steps": [1], "values_steps": [0.0]}, Capo(), BAD_STARTS),
        ("scores", 0, {"spans_steps": [0, 2, 2], "values_steps": [0.0] * 3}, Capo(), BAD_STARTS),
        ("scores", 0, {"spans_steps": [0, 3], "values_steps": [0.0] * 2}, Capo(), BAD_STARTS),
        ("scores", 0, {"spans_steps": [], "values_steps": []}, Capo(), BAD_STARTS),
        ("scores", 0, {"values_steps": [0.0, 1.0]}, Capo(), r"'steps': .*one finite value"),
    ],
)
def test_tables_that_do_not_fit_each_other_are_refused(table, row, changes, algorithm, message):
    tables = Tables([1, 0], [3, 2]).with_steps(([0], [0.0]), ([0], [0.0]))
    tables.with_estimates(reference=[[-1.0] * 3, [-1.0] * 2])
    getattr(tables, table)[row] |= changes
    with pytest.raises(Damaged, match=message):
        tables.credit(algorithm)


# ---- estimates of models


def test_ppo_samples_have_values_and_returns_in_the_order_of_samples():
    # With gamma = lambda = 1 an advantage is the sum of later rewards less the value. Prompt row 3 comes first.
    tables = Tables([1, 0], [1, 2], [4, 3]).with_estimates(values=[[0.25], [0.5, -0.5]])
    samples = tables.credit(Ppo(lam=1, whiten=False)).samples
    assert samples.select(["prompt_row", "advantages", "values", "returns"]).to_pydict() == {
        "prompt_row": [3, 4],
        "advantages": [[-0.5, 0.5], [1.75]],
        "values": [[0.5, -0.5], [0.25]],
        "returns": [[0, 0], [2]],
    }


def test_the_kl_divergence_from_the_reference_is_subtracted_from_the_reward():
    tables = Tables([1, 0], [2, 1]).with_estimates(reference=[[-1.5, -1.5], [-1.25]])
    credit = tables.credit(DrGrpo(kl=RewardKl(kind="k1")), kl_coefficient=1)
    # rewards (1, 0) less divergences (1, 0.25) are 0 and -0.25
    assert advantages_of(credit) == [[0.125, 0.125], [-0.125]]
    assert credit.metrics["kl"] == pytest.approx(1.25 / 3)
    assert credit.metrics["kl_coefficient"] == 1


def test_a_completion_with_an_estimate_of_nan_is_missing_and_counted():
    tables = Tables([1, 0, 1], [1, 1, 1]).with_estimates(reference=[[-1.0], [-1.0], [float("nan")]])
    credit = tables.credit(DrGrpo(kl=RewardKl(kind="k1")))
    assert credit.samples["sample"].to_pylist() == [0, 1]
    assert (credit.metrics["bad_estimates"], credit.metrics["missing"]) == (1, 1)
    assert credit.errors == {BAD_ESTIMATES: 1}


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [(Ppo(), "values.* reference"), (DistillationOnly(distillation=TEACHER), "policy, teacher.* reference")],
    ids=["ppo", "distillation"],
)
def test_an_algorithm_without_the_estimates_that_it_needs_is_refused(algorithm, expected):
    tables = Tables([1, 0], [1, 1]).with_estimates(reference=[[-1.0], [-1.0]])
    with pytest.raises(BadInput, match=f"'{algorithm.kind}' .*{expected}"):
        tables.credit(algorithm)


# ---- steps


def test_capo_uses_the_flagged_steps_and_not_their_aggregate():
    # rewards of tokens are (2, 2, 1 | 0, -1), as in the test of the algorithm
    tables = Tables([1, 0], [3, 2]).with_steps(([0, 2], [0.0, -1.0]), ([0, 1], [0.0, -1.0]))
    expected = np.array([1.2, 1.2, 0.2, -0.8, -1.8]) / np.sqrt(6.8 / 5)
    np.testing.assert_allclose(np.concatenate(advantages_of(tables.credit(Capo()))), expected, rtol=1e-6)


def test_algorithms_of_whole_completions_use_the_aggregate_of_steps():
    tables = Tables([1, 1], [3, 2]).with_steps(([0, 2], [0.0, -1.0]), ([0, 1], [0.0, 0.0]))
    assert advantages_of(tables.credit(DrGrpo())) == [[-0.5] * 3, [0.5] * 2]


@pytest.mark.parametrize(("algorithm", "expected"), [(Capo(), [0, 2]), (Grpo(), [2])], ids=["capo", "grpo"])
def test_flagged_steps_make_a_group_of_equal_outcomes_informative_for_capo_alone(algorithm, expected):
    spans = [([0, 2], [0.0, -1.0]), *[([0], [0.0])] * 5]
    tables = Tables([1, 1, 1, 1, 1, 0], [3, 2, 2, 2, 2, 2], [0, 0, 1, 1, 2, 2]).with_steps(*spans)
    credit = tables.credit(algorithm, quota=GroupQuota(target=3, metric="numeric", fill=False))
    assert sorted(set(credit.samples["prompt_row"].to_pylist())) == expected
    assert credit.metrics["shortfall_groups"] == 3 - len(expected)
    assert tables.find_informative_prompts(algorithm) == expected, "sampling waves count the same groups"


def test_flagged_steps_in_tokens_of_an_environment_make_no_group_informative():
    tables = Tables([1, 1], [4, 4]).with_steps(([0, 2], [0.0, -1.0]), ([0, 2], [0.0, 0.0]))
    assert tables.find_informative_prompts(Capo()) == [0]
    for rollout in tables.rollouts:
        rollout["segments"] = [{"policy_version": 5, "tokens": 2}, {"policy_version": -1, "tokens": 2}]
    assert tables.find_informative_prompts(Capo()) == []
    quota = GroupQuota(target=1, metric="numeric", fill=False)
    assert tables.credit(Capo(), quota=quota).metrics["informative_groups"] == 0


# ---- what is trained on


def test_truncated_completions_are_masked_in_the_loss_and_count_in_the_baseline():
    tables = Tables([3, 0, 0], [2, 1, 4])
    tables.rollouts[2]["finish_reason"] = "length"
    credit = tables.credit(DrGrpo(mask_truncated=True))
    assert advantages_of(credit) == [[2, 2], [-1], []]
    assert lengths_of(credit, "logprobs") == lengths_of(credit, "staleness") == [2, 1, 0]
    assert lengths_of(credit, "tokens") == [3, 2, 1]
    assert credit.metrics["masked"] == 1
    assert advantages_of(tables.credit(DrGrpo())) == [[2, 2], [-1], [-1] * 4]


def test_truncated_completions_are_masked_for_the_critic_too():
    tables = Tables([3, 0], [2, 1]).with_estimates(values=[[0.0, 0.0], [0.0]])
    tables.rollouts[1]["finish_reason"] = "length"
    credit = tables.credit(Ppo(mask_truncated=True))
    assert lengths_of(credit, "returns") == lengths_of(credit, "values") == [2, 0]


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
def test_groups_of_equal_rewards_are_kept_if_the_algorithm_can_train_on_them(algorithm, expected):
    zeros = [[0.0, 0.0]] * 3
    tables = Tables([1, 1, None], [2, 2, 2]).with_estimates(policy=zeros, teacher=zeros, values=zeros)
    assert tables.credit(algorithm).samples["sample"].to_pylist() == expected


def test_advantages_are_normalized_over_the_groups_that_dynamic_sampling_keeps():
    tables = Tables([1, 0, 100, 0], [1, 1, 1, 1], [0, 0, 1, 1])
    credit = tables.credit(ReinforcePlusPlus(kl=None), quota=GroupQuota(target=1, metric="numeric", fill=False))
    assert advantages_of(credit) == [[1], [-1]]
    assert credit.surplus == ((1,),)


def test_samples_have_the_score_of_a_reward_term_if_the_update_needs_it():
    tables = Tables([1.0, 0.0, 0.5], [2, 3, 1]).with_steps(*[([0], [7.0])] * 3)
    samples = tables.credit(Grpo(), sample_term="numeric").samples
    assert samples[TERM_REWARD].to_pylist() == [1.0, 0.0, 0.5]  # not multiplied by the weight of 2
    assert TERM_REWARD not in tables.credit(Grpo()).samples.column_names
