"""Generation configs of copied policies: end tokens of the chat template, and ids without a token."""

import json

import torch

from rheostat.models.config.engines import SamplingConfig
from rheostat.models.config.texts import RULES_BEFORE, TextRules
from rheostat.models.modeling.generation_config import complete_generation_config
from rheostat.models.modeling.logprobs import TokenLogprobs
from rheostat.models.modeling.policy import load_policy
from rheostat.models.records.schemas import FinishReason
from tests.support.chat_templates import tokenizer_of
from tests.support.engines import engine_of, request
from tests.support.policies import write_chat_policy

NAME, UNUSED = "qwen-2.5-base", 64


def write_padded_policy(directory):
    """Write a policy whose embeddings have more rows than the tokenizer has tokens, and return the number of tokens."""
    write_chat_policy(directory, NAME, likely={"<|im_end|>": 0.1})
    model, num_tokens = load_policy(directory), len(tokenizer_of(NAME))
    model.resize_token_embeddings(num_tokens + UNUSED)
    with torch.no_grad():
        model.lm_head.weight[num_tokens:] = model.lm_head.weight[:num_tokens].max(dim=0).values
    model.save_pretrained(directory)
    return num_tokens


def test_a_copied_policy_stops_at_the_end_of_its_template_and_generates_no_ids_without_a_token(tmp_path):
    num_tokens = write_padded_policy(tmp_path)
    complete_generation_config(tmp_path, TextRules())
    sampling, asked = SamplingConfig(max_new_tokens=60), request(0, 3, group=32)
    [completions] = engine_of(tmp_path).generate([asked], sampling)
    assert max(max(each.tokens) for each in completions) < num_tokens
    ends = {each.tokens[-1] for each in completions if each.finish_reason is FinishReason.STOP}
    assert tokenizer_of(NAME).convert_tokens_to_ids("<|im_end|>") in ends
    trained = TokenLogprobs(load_policy(tmp_path), temperature=1.0).head.settings.banned
    assert trained == (*range(num_tokens, num_tokens + UNUSED),)


def test_a_complete_generation_config_and_those_of_earlier_runs_stay_unchanged(tmp_path):
    write_padded_policy(tmp_path)
    file = tmp_path / "generation_config.json"
    before = file.read_bytes()
    complete_generation_config(tmp_path, RULES_BEFORE)
    assert file.read_bytes() == before
    complete_generation_config(tmp_path, TextRules())
    after = file.read_bytes()
    complete_generation_config(tmp_path, TextRules())
    assert (file.read_bytes(), len(json.loads(after)["eos_token_id"])) == (after, 2)
