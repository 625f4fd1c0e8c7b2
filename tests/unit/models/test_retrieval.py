"""The loss, the pairs and the metrics of retrievers, compared with a second implementation and by hand."""

from math import log

import numpy as np
import pytest
import torch

from rheostat.infra.errors import BadInput
from rheostat.infra.store.manifests import Manifest
from rheostat.models.config.retriever import EncoderConfig, PairFile, RetrieverConfig, TemplatedPairs
from rheostat.models.retrieval.loss import TeacherScores, dense_scores, divergence, late_scores, loss_terms
from rheostat.models.retrieval.measure import retrieval_of
from rheostat.models.retrieval.pairs import WORDS, Pair, file_pairs, load_pairs
from rheostat.models.retrieval.training import PairBatch
from rheostat.tasks.retriever import should_teach
from tests.support.json_lines import write_json_lines

THREE = log(3)
OWN = torch.tensor([1])
BOTH = torch.tensor([[0, 1]])
TEMPLATED = RetrieverConfig(pairs=TemplatedPairs(facts=200), encoder=EncoderConfig(batch_size=8))


def tensor(*rows, grad=False):
    return torch.tensor(rows, requires_grad=grad)


def terms(dense, late, *, method="cascade", cross=((0.0, THREE),), listed=BOTH, allowed=None):
    candidates = torch.ones_like(dense, dtype=torch.bool) if allowed is None else allowed
    taught = TeacherScores(listed, torch.tensor(cross) if isinstance(cross, tuple) else cross)
    return loss_terms(dense, late, OWN, candidates_BN=candidates, method=method, taught=taught)


# ---- scores


def test_late_interaction_adds_the_best_match_of_each_query_token():
    query, passages = torch.tensor([[[1.0, 0, 0, 0], [0, 2, 0, 0], [9, 9, 9, 9]]]), torch.zeros(2, 2, 4)
    passages[0] = torch.tensor([[3.0, 0, 0, 0], [0, 1, 0, 0]])
    passages[1] = torch.tensor([[-1.0, -1, 0, 0], [50, 50, 0, 0]])
    found = late_scores(query, torch.tensor([[1, 1, 0]]), passages, torch.tensor([[1, 1], [1, 0]]))
    assert found.tolist() == [[(3 + 2) / 2, (-1 - 2) / 2]]  # √4 = 2; the last tokens are padding


def test_the_dense_score_is_a_dot_product():
    assert dense_scores(tensor([1.0, 2]), tensor([3.0, 4], [5, -6])).tolist() == [[11, -7]]


# ---- the five terms


def test_the_five_terms_have_the_values_worked_by_hand():
    found = terms(tensor([0.0, THREE]), tensor([0.0, 0]))  # P_DE = 1/4, 3/4; P_LI = 1/2, 1/2; P_CE = 1/4, 3/4
    expected = {
        "dense": log(4 / 3), "late": log(2), "late to dense": log(4 / 3) / 2,
        "cross to late": log(0.5) / 4 + 3 * log(1.5) / 4, "cross to dense": 0,
    }  # fmt: skip
    assert {name: term.item() for name, term in found.items()} == pytest.approx(expected, abs=1e-6)


def test_a_method_has_only_the_terms_of_its_teachers():
    scores = tensor([0.0, 1.0])
    assert [*terms(scores, scores, method="dual")] == ["dense"]
    assert [*terms(scores, scores, method="self-distillation")] == ["dense", "late", "late to dense"]


def test_the_distillation_loss_is_zero_if_scores_differ_by_a_constant_for_each_query():
    teacher = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    same = teacher + tensor([4.0], [-7], [0.5])
    assert divergence(teacher, same).item() == pytest.approx(0, abs=1e-6)
    assert divergence(teacher, same * 2).item() > 0.01


def test_gradients_of_the_distillation_loss_reach_the_student_and_not_its_teacher():
    dense, late, cross = (tensor(row, grad=True) for row in ([0.0, 1], [1.0, -1], [2.0, 0]))
    found = terms(dense, late, cross=cross)
    found["late to dense"].backward(retain_graph=True)
    assert late.grad is None or not late.grad.any()
    assert dense.grad is not None and dense.grad.any()
    (found["cross to late"] + found["cross to dense"]).backward()
    assert cross.grad is None and late.grad is not None and late.grad.any()


def test_a_cross_encoder_scores_only_the_listed_passages():
    one, other = (terms(tensor([0.0, THREE, far]), tensor([0.0, 0, far])) for far in (0.0, 9.0))
    for name in ("cross to late", "cross to dense"):
        assert one[name].item() == pytest.approx(other[name].item(), abs=1e-6)
    assert one["dense"].item() != pytest.approx(other["dense"].item(), abs=0.1)


def test_a_copy_of_the_right_passage_is_not_a_negative():
    batch = PairBatch(["q", "r"], ["a", "b", "b", "a"])
    assert batch.listed().tolist() == [[0, 1], [2, 3]]
    assert batch.candidates().tolist() == [[True, True, True, False], [True, False, True, True]]
    allowed = torch.tensor([[True, True, False]])
    found = terms(tensor([0.0, THREE, 99]), tensor([0.0, 0, 99]), allowed=allowed)
    assert found["dense"].item() == pytest.approx(log(4 / 3)) and found["late"].item() == pytest.approx(log(2))


@pytest.mark.parametrize(
    ("method", "teacher", "decision"),
    [("checked", 0.7, True), ("checked", 0.6, False), ("checked", 0.5, False), ("cascade", 0.5, True)],
)
def test_a_cross_encoder_is_a_teacher_if_its_mrr_is_higher_or_the_method_requires_it(method, teacher, decision):
    known = (Manifest(key=key, metrics={"mrr": mrr}) for key, mrr in (("student", 0.6), ("teacher", teacher)))
    assert should_teach(RetrieverConfig(method=method), *known) == decision


# ---- measures


def test_mrr_ignores_ranks_beyond_ten_and_recall_ranks_beyond_fifty():
    found = retrieval_of(np.array([1, 2, 10, 11, 50, 51]), seed=0)
    assert found.mrr == pytest.approx((1 + 1 / 2 + 1 / 10) / 6) and found.recall == pytest.approx(5 / 6)
    assert found.low < found.mrr < found.high and found == retrieval_of(np.array([1, 2, 10, 11, 50, 51]), seed=0)
    sure = retrieval_of(np.ones(9, np.int64), seed=0)
    assert (sure.low, sure.high) == (1, 1)


# ---- pairs


def test_generated_pairs_are_reproducible_and_no_passage_is_in_both_splits():
    pairs = load_pairs(TEMPLATED)
    assert pairs == load_pairs(TEMPLATED) != load_pairs(TEMPLATED.model_copy(update={"seed": 1}))
    train, heldout = ({pair.passage for pair in part} for part in (pairs.train, pairs.heldout))
    assert not train & heldout and len(train | heldout) == len(pairs.passages) == 200


def test_a_query_describes_four_attributes_of_its_passage_which_no_negative_has_together():
    meant = {name: value[0] for values in WORDS for value in values for name in value[1:]}
    pairs = load_pairs(TEMPLATED)
    for pair in (*pairs.train, *pairs.heldout):
        attributes = {meant[word] for word in pair.query.split()}
        assert len(attributes) == 4 and attributes < set(pair.passage.split())
        for other in pair.negatives:
            assert len(set(other.split()) & set(pair.passage.split())) >= 3 and not attributes <= set(other.split())


def test_pairs_of_a_file_are_its_rows(tmp_path):
    rows = [{"query": f"q{n}", "passage": f"p{n}", "negatives": ["x", f"p{n + 1}"]} for n in range(30)]
    source = PairFile(path=write_json_lines(tmp_path / "pairs.jsonl", rows), negatives_column="negatives")
    pairs = load_pairs(RetrieverConfig(pairs=source, encoder=EncoderConfig(batch_size=4), heldout_fraction=0.3))
    assert {*pairs.train, *pairs.heldout} == {
        Pair(query=f"q{n}", passage=f"p{n}", negatives=("x", f"p{n + 1}")) for n in range(30)
    }
    assert sorted(pairs.passages) == sorted(["x", *(f"p{n}" for n in range(31))])


@pytest.mark.parametrize("version", [1, 2])
def test_near_twins_of_passages_are_on_the_same_side_except_in_runs_with_version_1(tmp_path, version):
    rows = [{"query": f"q{n}", "passage": text} for n in range(60) for text in (f"Passage {n}", f"  PASSAGE\t{n}")]
    source = PairFile(path=write_json_lines(tmp_path / "pairs.jsonl", rows), version=version)
    pairs = load_pairs(RetrieverConfig(pairs=source, encoder=EncoderConfig(batch_size=4), heldout_fraction=0.5))
    train, heldout = ({pair.query for pair in part} for part in (pairs.train, pairs.heldout))
    assert bool(train & heldout) == (version == 1)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ('{"query": "a", "passage": "b", "passage": "c"}', ("pairs.jsonl:1", "'passage'", "2 times")),
        ('{"query": "a", "passage": "b", " query": "c"}', ("pairs.jsonl:1", "'query' and ' query'")),
    ],
)
def test_pairs_with_repeated_keys_are_refused_except_in_runs_with_version_1(tmp_path, content, parts):
    (tmp_path / "pairs.jsonl").write_text(content)
    source = PairFile(path=tmp_path / "pairs.jsonl")
    with pytest.raises(BadInput) as refused:
        file_pairs(source, 0, 0.5)
    assert all(part in str(refused.value) for part in parts)
    assert file_pairs(source.model_copy(update={"version": 1, "heldout_path": source.path}), 0, 0.5).train
