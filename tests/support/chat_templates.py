"""Chat templates that behave like published ones, and tokenizers that know their tokens.

The templates are rewritten from the documentation of their authors, without their instructions for the model. If TRL is
installed, the tests also use the original templates that it contains.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rheostat.models.data.problems import Message
from rheostat.models.text.calls import encode_call
from rheostat.models.text.tokenizer import train_tokenizer
from rheostat.models.text.turns import turn_format


@dataclass(frozen=True)
class Published:
    """Published chat template with its tokens and its known properties."""

    template: str
    control: tuple[str, ...]
    """Special tokens."""
    eos: str
    words: tuple[str, ...] = ()
    """Tokens that are added but not special."""
    stops: tuple[str, ...] = ()
    """Tokens in addition to EOS that generation_config.json lists as ends."""
    bos: str = ""
    roles: tuple[str, ...] = ("tool", "user")
    """Roles whose messages may follow a turn."""
    keeps: tuple[str, ...] | None = None
    """Subset of `roles`, after whose messages earlier messages stay unchanged. All roles by default."""
    parser: str | None = None
    """Format of tool calls, if it is one of ours."""

    @property
    def keeping(self) -> tuple[str, ...]:
        return self.roles if self.keeps is None else self.keeps


GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template that marks the turns of the assistant with generation blocks."""
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
HERMES_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_HERMES_TOOLS = (
    "{%- if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n{% endif %}'
)
_HERMES_CALLS = (
    "{% for call in m.tool_calls %}{{ '\n' if content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n"
)
_HERMES_ANSWERS = (
    "{% elif m.role == 'tool' %}{% if loop.first or loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ content }}\n</tool_response>"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ALTERNATE = (
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
)

QWEN_2_5 = (
    _HERMES_TOOLS
    + "{% for m in messages %}{% set content = m.content %}{% if m.role in ('system', 'user') %}"
    + "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% elif m.role == 'assistant' %}"
    + "<|im_start|>assistant\n{{ content }}"
    + _HERMES_CALLS
    + _HERMES_ANSWERS
)

QWEN_3 = (  # thoughts of turns before the last question are left out; the last turn has some, be they empty
    _HERMES_TOOLS
    + "{% set asked = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}"
    + "{% set asked.last = messages.index(m) %}{% endfor %}"
    + "{% for m in messages %}{% set content = m.content %}{% if m.role in ('system', 'user') %}"
    + "<|im_start|>{{ m.role }}\n{{ content }}<|im_end|>\n{% elif m.role == 'assistant' %}{% set thought = '' %}"
    + "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    + "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    + "{% if loop.index0 > asked.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    + "{{ content }}"
    + _HERMES_CALLS
    + _HERMES_ANSWERS
)

_LLAMA_TURN = "{{ '<|start_header_id|>' ~ %s ~ '<|end_header_id|>\n\n' }}"
LLAMA_3_1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}" + _LLAMA_TURN % "'assistant'" + '{"name": "{{ call.name }}", '
    "\"parameters\": {{ call.arguments | tojson }}}<|eot_id|>{% elif m.role == 'tool' %}"
    + _LLAMA_TURN
    % "'ipython'"
    + ""
    "{{ m.content | tojson }}<|eot_id|>{% else %}"
    + _LLAMA_TURN
    % "m.role"
    + "{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}" + _LLAMA_TURN % "'assistant'" + "{% endif %}"
)

MISTRAL_V3 = (  # the tools stand before the last question, wherever that is
    "{{ bos_token }}{% set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and m == last %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}{% elif m.role == 'assistant' %} {{ m.content | trim }}"
    "{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content | string }}, "
    '"call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)

MISTRAL_V7 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    "{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content }}"
    "{{ eos_token }}{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}"
    "[/TOOL_RESULTS]{% endif %}{% endfor %}"
)

GEMMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    + _ALTERNATE
    + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    + "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)

PHI_4 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"
)

GPT_OSS = (  # a tool's answer begins with the name of the call; the last turn ends otherwise than earlier ones
    "{% set called = namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% set call = m.tool_calls[0].function %}{% set called.name = call.name %}{% if m.content %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}<|start|>assistant to=functions."
    "{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% elif m.role == 'tool' %}"
    "<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_DEEPSEEK_ANSWERS = (
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<｜tool▁outputs▁begin｜>{% endif %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% if loop.last or loop.nextitem.role != 'tool' %}"
    "<｜tool▁outputs▁end｜>{% endif %}{% endif %}{% endfor %}"
)
DEEPSEEK_V3 = (  # takes the arguments of a call as text only; its tokens for roles are not special
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.tool_calls %}"
    "<｜Assistant｜>{{ m.content }}<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}"
    "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>"
    "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' if loop.previtem.role == 'user' }}{{ m.content }}<｜end▁of▁sentence｜>"
    + _DEEPSEEK_ANSWERS
    + "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜>{% endif %}"
)
DEEPSEEK_R1 = (  # thoughts are begun by the prompt and left out later; knows no calls
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    + _DEEPSEEK_ANSWERS
    + "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜><think>\n{% endif %}"
)
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
)
DEEPSEEK_WORDS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    *(f"<｜tool▁{name}▁{side}｜>" for name in ("calls", "call", "outputs", "output") for side in ("begin", "end")),
    "<｜tool▁sep｜>",
)

GRANITE = (
    "{% if tools %}<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n{% endif %}"
    "{% for m in messages %}<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>"
    "{{ m.content }}{% if m.tool_calls %}<|tool_call|>[{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

COMMAND_R = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'tool' %}<|SYSTEM_TOKEN|>"
    '<|START_TOOL_RESULT|>[{"tool_call_id": "{{ m.tool_call_id }}", '
    '"results": {"0": {{ {"content": m.content} | tojson }}}}]'
    "<|END_TOOL_RESULT|>{% elif m.tool_calls %}<|CHATBOT_TOKEN|><|START_THINKING|>{{ m.content }}<|END_THINKING|>"
    "<|START_ACTION|>[{% for call in m.tool_calls %}"
    '{"tool_call_id": "{{ call.id }}", "tool_name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}{{ ", " if not loop.last }}{% endfor %}]<|END_ACTION|>'
    "{% elif m.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
    "{% else %}<|USER_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)

GLM_4 = (  # a turn is ended by the token that begins the next message
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}<|observation|>{% endif %}"
    "{{ '\n<tool_response>\n' }}{{ m.content }}\n</tool_response>"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ '\n<tool_call>' + call.function.name + '\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SMOLVLM = (  # contents are lists of parts
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}: {% for part in m.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

PLAIN = (  # no token of its own: a turn ends with EOS alone, which is not written again
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_MISTRAL = tuple(
    f"[{side}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS", "SYSTEM_PROMPT") for side in ("", "/")
)
_MISTRAL_CONTROL = ("<s>", "</s>", "[TOOL_CALLS]", "[TOOL_CONTENT]", *_MISTRAL)

PUBLISHED = {
    "qwen-2.5": Published(QWEN_2_5, CHATML, "<|im_end|>", HERMES_WORDS, ("<|endoftext|>",), parser="hermes"),
    "qwen-2.5-base": Published(QWEN_2_5, CHATML, "<|endoftext|>", HERMES_WORDS, parser="hermes"),
    "qwen-3": Published(QWEN_3, CHATML, "<|im_end|>", HERMES_WORDS, keeps=(), parser="hermes"),
    "llama-3.1": Published(
        LLAMA_3_1,
        ("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        "<|eot_id|>",
        stops=("<|eom_id|>",),
        bos="<|begin_of_text|>",
        parser="llama3_json",
    ),
    "mistral-v3": Published(MISTRAL_V3, _MISTRAL_CONTROL, "</s>", bos="<s>", keeps=("tool",)),
    "mistral-v7": Published(MISTRAL_V7, _MISTRAL_CONTROL, "</s>", bos="<s>"),
    "gemma-3": Published(
        GEMMA_3, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", bos="<bos>", roles=("user",)
    ),
    "phi-4": Published(PHI_4, (*CHATML, "<|im_sep|>"), "<|im_end|>"),
    "gpt-oss": Published(
        GPT_OSS,
        tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "call", "return", "endoftext")),
        "<|return|>",
        stops=("<|call|>", "<|endoftext|>"),
        keeps=("tool",),
    ),
    "deepseek-v3": Published(DEEPSEEK_V3, DEEPSEEK, DEEPSEEK[1], DEEPSEEK_WORDS, bos=DEEPSEEK[0]),
    "deepseek-r1": Published(DEEPSEEK_R1, DEEPSEEK, DEEPSEEK[1], DEEPSEEK_WORDS, bos=DEEPSEEK[0], keeps=()),
    "granite-3": Published(
        GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"), "<|end_of_text|>"
    ),
    "command-r": Published(
        COMMAND_R,
        (
            "<BOS_TOKEN>",
            *(f"<|{name}_TOKEN|>" for name in ("START_OF_TURN", "END_OF_TURN", "USER", "CHATBOT", "SYSTEM")),
            *(
                f"<|{side}_{name}|>"
                for name in ("THINKING", "ACTION", "RESPONSE", "TOOL_RESULT")
                for side in ("START", "END")
            ),
        ),
        "<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
    ),
    "glm-4": Published(
        GLM_4,
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"),
        "<|endoftext|>",
        HERMES_WORDS,
        ("<|user|>", "<|observation|>"),
    ),
    "smolvlm": Published(SMOLVLM, ("<|im_start|>", "<end_of_utterance>", "<image>"), "<end_of_utterance>"),
    "plain": Published(PLAIN, (), "<|eos|>"),
}


@cache
def _trained():
    texts = [f"Ana has {n} pens and calls find {n}: it is sunny, role user tool assistant" for n in range(200)]
    return train_tokenizer(texts, vocab_size=400, context=4096).backend_tokenizer.to_str()


@cache
def tokenizer_of(name):
    """A byte-level tokenizer with the tokens and the template of a published one."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    published = PUBLISHED[name]
    backend = Tokenizer.from_str(_trained())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in published.control])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in published.words])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=published.eos,
        pad_token="<|pad|>",
        bos_token=published.bos or None,
        chat_template=published.template,
    )


def with_template(template, *, backend=None):
    """Build a tokenizer with another chat template; its tokens are those of `plain` unless a backend is passed."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend or tokenizer_of("plain").backend_tokenizer,
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        chat_template=template,
    )


FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
CASES = [(name, role) for name, known in sorted(PUBLISHED.items()) for role in known.roles]
"""All templates, with each role whose messages may follow a turn."""


@cache
def format_of(name, *, is_chat=True):
    known, tokenizer = PUBLISHED[name], tokenizer_of(name)
    stated = tokenizer.convert_tokens_to_ids(list(known.stops))
    return turn_format(tokenizer, stated=stated, tools=[FIND], is_chat=is_chat)


def message(role, text):
    return Message(role, text, "find" if role == "tool" else "")


def build_template_chat(name, chat):
    """Return a chat for `apply_chat_template`: tool messages answer the calls of the turn before them."""
    answered, found = [], []
    for turn in chat:
        one = dict(turn)
        if one["role"] == "tool":
            one |= {"name": "find", "tool_call_id": f"{len(answered):09d}"}
            answered.append(one)
        else:
            answered = []
        if PUBLISHED[name].template == PUBLISHED["smolvlm"].template:
            one["content"] = [{"type": "text", "text": one["content"]}]
        found.append(one)
    return found


def call_turn(name, calls=1):
    arguments = '{"what": "it"}' if name == "deepseek-v3" else {"what": "it"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [encode_call("find", arguments, number=number) for number in range(calls)],
    }


def templated(name, chat, *, generation_prompt=True):
    return tokenizer_of(name).apply_chat_template(
        build_template_chat(name, chat),
        tools=[FIND],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=generation_prompt,
    )


def originals() -> dict[str, str]:
    """Return the original templates that TRL contains, as their authors published them, if TRL is installed."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return {}
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text() for file in files if not file.stem.endswith("_training")}
