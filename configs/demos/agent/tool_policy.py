"""Small policy with random weights, as with `kind = "scratch"`, whose chat template shows tools, calls and results."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerFast

from rheostat.models.config.policy import ScratchPolicy
from rheostat.models.inspection.directory import Inspected, inspect_decoder
from rheostat.models.inspection.plain import DecoderSizes
from rheostat.models.text.tokenizer import train_tokenizer

TEMPLATE: Final = """\
{% for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}\
{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\
{% for call in message.tool_calls or [] %}\
<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>\
{% endfor %}\
{{ eos_token if message.role == 'assistant' }}
{% endfor %}\
{% if add_generation_prompt %}assistant: {% endif %}"""
"""Chat template: the tools with the names of their arguments, then a line for each message. The EOS token ends each
message of the policy."""


class ToolPolicy(ScratchPolicy):
    """Settings of the policy, which are those of `kind = "scratch"`."""

    implementation = "tool_policy:write_tool_policy"
    inspection = "tool_policy:inspect_tool_policy"


def write_tool_policy(policy: ToolPolicy, directory: Path, *, texts: Iterable[str], seed: int) -> int:
    """Build a policy with random weights and a tokenizer trained on `texts`. Return the number of parameters."""
    from rheostat.models.modeling.policy import build_scratch, save_policy  # imports torch

    tokenizer = train_tool_tokenizer(policy, texts)
    model = build_scratch(policy, tokenizer, seed=seed)
    save_policy(model, tokenizer, directory)
    return int(model.num_parameters())


def inspect_tool_policy(policy: ToolPolicy, texts: Iterable[str]) -> Inspected:
    """Train the tokenizer on `texts`, and describe the policy that a run would build with this tokenizer."""
    tokenizer = train_tool_tokenizer(policy, texts)
    return inspect_decoder(DecoderSizes.from_scratch(policy, vocab_size=len(tokenizer)), tokenizer)


def train_tool_tokenizer(policy: ToolPolicy, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer on texts, and give it the chat template with tools."""
    tokenizer = train_tokenizer(texts, vocab_size=policy.vocab_size, context=policy.context)
    tokenizer.chat_template = TEMPLATE
    return tokenizer
