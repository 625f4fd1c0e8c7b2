"""Step labels of process reward models: their loss, their files, and the ends of steps in model inputs."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForTokenClassification, LlamaConfig, PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.models.config.process_models import ProcessModelReward, StepLabelFile, TrainedProcessModel
from rheostat.models.config.reward_terms import PatternSteps
from rheostat.models.data.problems import Message
from rheostat.models.data.step_labels import load_step_labels
from rheostat.models.modeling.layout import lay_out
from rheostat.models.modeling.process_model import StepLogits
from rheostat.models.text.step_inputs import encode_solutions, encode_steps
from rheostat.models.text.steps import aggregate
from rheostat.models.training.step_labels import step_label_loss
from tests.support.chat_templates import tokenizer_of
from tests.support.data_files import write_lines
from tests.support.policies import DECODER, small_tokenizer
from tests.support.step_labels import write_solutions


# ---- loss
def test_the_loss_of_a_step_is_its_binary_cross_entropy_by_hand():
    logits_N, labels_N = torch.tensor([0.0, math.log(3), math.log(3), math.log(3)]), torch.tensor([1.0, 1.0, 0.0, 0.5])
    log3, log4 = math.log(3), math.log(4)  # p = 3/4
    expected = [math.log(2), log4 - log3, log4, log4 - log3 / 2]
    assert step_label_loss(logits_N, labels_N).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_gradient_of_a_step_is_the_predicted_probability_minus_the_label():
    logits_N = torch.tensor([-2.0, 0.3, 4.0], requires_grad=True)
    labels_N = torch.tensor([0.0, 0.7, 1.0])
    step_label_loss(logits_N, labels_N).sum().backward()
    torch.testing.assert_close(logits_N.grad, logits_N.detach().sigmoid() - labels_N)
    certain = torch.tensor([0.25], requires_grad=True)
    step_label_loss(certain, certain.detach().sigmoid()).sum().backward()
    assert float(certain.grad) == pytest.approx(0, abs=1e-7)


def build_classifier(**changes):
    torch.manual_seed(3)
    shape = {**DECODER, "vocab_size": 354, "num_labels": 2, "classifier_dropout": 0.0}
    model = AutoModelForTokenClassification.from_config(LlamaConfig(**shape, **changes)).eval()
    torch.nn.init.normal_(model.score.weight)
    torch.nn.init.normal_(model.score.bias)
    return model


def test_loss_and_gradient_equal_those_of_the_token_classifier_that_prm_trainers_train():
    """TRL's PRMTrainer minimizes this loss of transformers: the cross-entropy at the tokens whose label is not -100."""
    model, tokenizer = build_classifier(), small_tokenizer()
    solution = encode_steps(tokenizer, "1+2?", ["1+2=3", "so 3"], separator="\n", source="row")
    tokens, ends = torch.from_numpy(solution.tokens[:-1]).long()[None], solution.trained_positions - 1
    labels = torch.full_like(tokens, -100)
    labels[0, ends] = torch.tensor([1, 0])
    expected = model(input_ids=tokens, labels=labels).loss
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    module = StepLogits(model)
    logits_N = module(module.prepare_inputs(lay_out([solution]), torch.device("cpu")))
    loss = step_label_loss(logits_N, torch.tensor([1.0, 0.0])).mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-4)


def test_soft_labels_give_the_cross_entropy_between_the_two_labels():
    logits_N2, labels_N = torch.randn(5, 2), torch.tensor([0.0, 0.25, 0.5, 0.9, 1.0])
    targets_N2 = torch.stack([1 - labels_N, labels_N], dim=-1)
    expected = torch.nn.functional.cross_entropy(logits_N2, targets_N2, reduction="none")
    found = step_label_loss(logits_N2[:, 1] - logits_N2[:, 0], labels_N)
    torch.testing.assert_close(found, expected)


# ---- ends of steps
def read_ends(model_input) -> list[int]:
    return (model_input.trained_positions - 1).tolist()


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that merges a line break with the letter before it, and with the letter after it."""
    vocabulary = {"a": 0, "b": 1, "\n": 2, "\nb": 3, "a\n": 4, "<eos>": 5}
    model = BPE(vocab=vocabulary, merges=[("\n", "b"), ("a", "\n")], ignore_merges=False)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="<eos>", pad_token="<eos>")


def test_steps_end_at_the_last_token_of_the_separator_also_if_the_tokenizer_would_merge_it():
    tokenizer = merging_tokenizer()
    assert tokenizer("aa\nbb\n")["input_ids"] == [0, 0, 3, 1, 2]  # the first step ends inside of token 3
    assert tokenizer("ba\n")["input_ids"] == [1, 4]  # the separator is merged with the step
    solution = encode_steps(tokenizer, "ab", ["aa", "bb\n", "ba"], separator="\n", source="row")
    assert solution.tokens.tolist() == [0, 1, 0, 0, 2, 1, 1, 2, 1, 0, 2, 0]
    assert read_ends(solution) == [4, 7, 10]


def test_a_solution_is_tokenized_as_trl_describes_for_stepwise_supervision():
    """TRL tokenizes prompt, steps and separator separately, and labels the last token of each separator."""
    tokenizer, prompt, steps = small_tokenizer(), "Ana has 3 pens.", ["3+4=7", "", "#", "So 7."]
    expected, ends = tokenizer(prompt)["input_ids"], []
    for step in steps:
        expected += tokenizer(step, add_special_tokens=False)["input_ids"]
        expected += tokenizer("\n\n", add_special_tokens=False)["input_ids"]
        ends.append(len(expected) - 1)
    solution = encode_steps(tokenizer, prompt, steps, separator="\n\n", source="row")
    assert solution.tokens.tolist() == [*expected, 0]
    assert read_ends(solution) == ends


def test_special_tokens_in_steps_are_ordinary_text():
    tokenizer = small_tokenizer()
    solution = encode_steps(tokenizer, "1+2?", ["3<|eos|>"], separator="\n", source="row")
    assert tokenizer.eos_token_id not in solution.tokens.tolist()


def test_a_chat_is_encoded_by_the_chat_template_up_to_the_turn_of_the_assistant():
    tokenizer = tokenizer_of("qwen-2.5")
    chat = [{"role": "user", "content": "1+2?"}]
    expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    solution = encode_steps(tokenizer, (Message("user", "1+2?"),), ["3"], separator="\n", source="row")
    assert tokenizer.decode(solution.tokens[:-1]) == f"{expected}3\n"


def test_a_separator_without_tokens_and_solutions_beyond_the_context_are_refused(tmp_path):
    file = StepLabelFile(path=write_solutions(tmp_path / "steps.jsonl", 20))
    solutions, _ = load_step_labels(file, "train")
    empty = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(BadInput, match=r"row: .* no token for the separator '\\n'"):
        encode_steps(empty, "a", ["a"], separator="\n", source="row")
    with pytest.raises(BadInput, match=r"steps.jsonl:\d+: .* tokens, but the context of the model is only 9 tokens"):
        encode_solutions(solutions, small_tokenizer(), separator="\n", context=9, drop_long=False)
    with pytest.raises(BadInput, match="leaves no row"):
        encode_solutions(solutions, small_tokenizer(), separator="\n", context=9, drop_long=True)


# ---- files
ROWS = [
    {"prompt": "2+2?", "completions": ["2+2=4", "#### 4"], "labels": [True, True]},
    {"prompt": "3+3?", "completions": ["3+3=5", "#### 5"], "labels": [False, 0.25]},
    {"prompt": "4+4?", "completions": ["8"], "labels": [1]},
]


def load(path, split="train", **settings):
    file = StepLabelFile(path=path, heldout_path=path.with_name("kept.jsonl"), **settings)
    return load_step_labels(file, split)


def test_booleans_integers_and_fractions_are_read_from_lines_and_tables_alike(tmp_path):
    rows, dropped = load(write_lines(tmp_path / "steps.jsonl", *ROWS))
    assert [(each.prompt, each.steps, each.labels) for each in rows] == [
        ("2+2?", ("2+2=4", "#### 4"), (1.0, 1.0)),
        ("3+3?", ("3+3=5", "#### 5"), (0.0, 0.25)),
        ("4+4?", ("8",), (1.0,)),
    ]
    assert dropped == 0
    table = pa.Table.from_pylist([{**row, "labels": [float(label) for label in row["labels"]]} for row in ROWS])
    pq.write_table(table, tmp_path / "steps.parquet")
    tabular, _ = load(tmp_path / "steps.parquet")
    assert [(each.prompt, each.steps, each.labels) for each in tabular] == [
        (each.prompt, each.steps, each.labels) for each in rows
    ]


def test_columns_and_the_template_of_the_prompt_can_be_chosen(tmp_path):
    row = {"question": "2+2?", "process": {"steps": ["4"]}, "rating": [1]}
    columns = {"prompt_column": "question", "steps_column": "process.steps", "labels_column": "rating"}
    [each], _ = load(write_lines(tmp_path / "steps.jsonl", row), template="Q: {prompt}\n", **columns)
    assert (each.prompt, each.steps) == ("Q: 2+2?\n", ("4",))


def test_all_solutions_of_a_prompt_are_in_the_same_split(tmp_path):
    file = StepLabelFile(path=write_solutions(tmp_path / "steps.jsonl", 200), heldout_fraction=0.3)
    train, heldout = ({each.prompt for each in load_step_labels(file, split)[0]} for split in ("train", "heldout"))
    assert train
    assert heldout
    assert not train & heldout
    assert len(load_step_labels(file, "train")[0]) + len(load_step_labels(file, "heldout")[0]) == 200


def test_empty_rows_are_left_out_and_counted(tmp_path):
    blank = [{**ROWS[0], "completions": ["4", " "]}, {"prompt": "5?", "completions": [], "labels": []}]
    path = write_lines(tmp_path / "steps.jsonl", *ROWS, *blank)
    rows, dropped = load(path, drop=("empty",))
    assert (len(rows), dropped) == (3, 2)
    with pytest.raises(BadInput, match=r"steps.jsonl:4: completions\[1\]: .*steps.jsonl:5: completions: .* no steps"):
        load(path)


def test_a_held_out_prompt_that_is_also_a_training_prompt_is_refused(tmp_path):
    path = write_lines(tmp_path / "steps.jsonl", *ROWS)
    write_lines(tmp_path / "kept.jsonl", {"prompt": "9+9?", "completions": ["18"], "labels": [1]}, ROWS[1])
    with pytest.raises(BadInput, match=r"kept.jsonl:2: this held-out prompt is also the prompt of a training row"):
        load(path, "heldout")


# ---- one number per completion
@pytest.mark.parametrize(("how", "expected"), [("min", 0.25), ("product", 0.1), ("mean", 1.55 / 3), ("last", 0.5)])
def test_scores_of_steps_are_combined_into_one_number(how, expected):
    assert aggregate((0.8, 0.25, 0.5), how) == pytest.approx(expected)
    assert aggregate((0.5,), how) == 0.5


def test_the_reward_scores_steps_from_0_to_1():
    model = TrainedProcessModel(labels=StepLabelFile(path="steps.jsonl"))
    reward = ProcessModelReward(model=model, aggregate="product", steps=PatternSteps(pattern=r"\n"))
    assert (reward.granularity, reward.score_range, reward.aggregation) == ("step", (0.0, 1.0), "product")
    assert reward.term == "process_model"
