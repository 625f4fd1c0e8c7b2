"""Job for a data file and a policy: columns, reward and sizes are chosen from their contents and written as TOML."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Final, TypeVar

from pydantic import JsonValue, ValidationError

from rheostat.infra.config import Settings
from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.config.data import FileData
from rheostat.models.config.lora import LoraConfig
from rheostat.models.config.objectives import UpdateConfig
from rheostat.models.config.policy import DirectoryPolicy
from rheostat.models.config.proposals import JobProposal, ProposalRequest
from rheostat.models.data.problems import Problem, load_problems
from rheostat.models.inspection.directory import Inspected, inspect_policy
from rheostat.models.proposals.columns import Columns, find_columns
from rheostat.models.proposals.rewards import RewardProposal, propose_reward
from rheostat.models.proposals.sizes import (
    GROUP_SIZE,
    Machine,
    TextLengths,
    Value,
    explain_full_training,
    propose_batch_rows,
    propose_iterations,
    propose_learning_rate,
    propose_lora,
    propose_microbatch,
    propose_new_tokens,
    propose_prompts,
)
from rheostat.models.text.tokenizer import problem_texts, tokenize_problems

FRACTIONS: Final = (0.1, 0.2, 0.3, 0.5)
"""Shares of held-out problems, tried in this order until both splits have problems. In a small file, 0.1 may select
none."""
GREETING: Final = "You are a helpful assistant."
"""System message that turns plain-text prompts into chats if the reward needs no instruction for the policy."""
MAX_STEPS_UP: Final = 2
"""Maximum number of `..` in a relative path of the job. Paths that need more are written as absolute paths."""
HUB_KEYS: Final = ("config", "split", "heldout_split")
"""Keys that choose a part of a dataset on the Hub."""
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_MARKERS: Final = {"numeric": "####", "math": "boxed"}
"""Text that introduces the final answer, by the kind of the reward. If prompts already contain it, they need no
instruction."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Data and policy of the request, with the chosen columns and the proposed reward."""

    columns: Columns
    data: FileData
    train: Sequence[Problem]
    heldout: Sequence[Problem]
    policy: Inspected
    reward: RewardProposal

    @property
    def is_chat(self) -> bool:
        """Whether the policy has a chat template."""
        return bool(self.policy.tokenizer.chat_template)


def propose_job(request: ProposalRequest) -> JobProposal:
    """Return a job that fits the data, the policy and the machine of a request. The data is read and its texts are
    tokenized, but nothing is written.

    Raises BadInput if the data or the policy cannot be used, or if the user must decide something.
    """
    inputs = _read_inputs(request)
    machine = Machine(request.gpus, request.memory, request.cores)
    shape, outline = inputs.policy.shape, inputs.policy.outline
    lengths = _measure(inputs)
    new_tokens = propose_new_tokens(lengths, thinks=inputs.reward.thinks, is_chat=inputs.is_chat, context=shape.context)
    num_train, num_heldout = (
        sum(length <= shape.context - new_tokens.value for length in split)
        for split in (lengths.train, lengths.heldout)
    )
    too_long = len(lengths.prompts) - num_train - num_heldout
    prompts = propose_prompts(max(1, num_train), machine)
    full = UpdateConfig(dtype="bfloat16" if machine.gpus else "float32")
    lora = propose_lora(full, outline, machine)
    update = full if lora is None else full.model_copy(update={"lora": LoraConfig(rank=int(lora.value))})
    longest = min(max(lengths.prompts) + int(new_tokens.value), shape.context)
    batch_rows = None
    if machine.gpus:
        completions = ceil(int(prompts.value) * GROUP_SIZE / machine.gpus)
        batch_rows = propose_batch_rows(
            update, outline, shape, longest=longest, completions=completions, machine=machine
        )
    lines = [
        *_write_head(request, inputs, propose_iterations(max(1, num_train), int(prompts.value))),
        *_write_data(request, inputs, too_long=too_long),
        *_write_policy(request, inputs),
        *_write_rollout(prompts, new_tokens),
        *_write_engine(update, batch_rows),
        *_write_scoring(request, inputs.reward),
        *_write_update(
            update,
            rate=propose_learning_rate(outline, lora=lora is not None),
            lora=lora,
            why_full=explain_full_training(full, outline, machine),
            microbatch=propose_microbatch(update, outline, longest=longest, machine=machine),
        ),
        *_write_pools(machine),
        *_write_evaluation(num_heldout, machine),
    ]
    return JobProposal(document="\n".join(lines) + "\n", findings=_describe(inputs, lengths, lora))


def _read_inputs(request: ProposalRequest) -> _Inputs:
    """Read the data and the policy of a request. Choose the columns, the reward, and the instruction for the policy."""
    keys = {name: getattr(request, name) for name in HUB_KEYS}
    data = _validate(FileData, {"kind": "file", "path": _locate(request.data), **keys}, option="--data")
    columns = find_columns(data.path, prompt=request.prompt_column, answer=request.answer_column)
    chosen = {"prompt_column": columns.prompt, "answer_column": columns.answer, "answer_columns": columns.answers}
    data = data.model_copy(update=chosen)
    if columns.rubric is not None and request.judge is not None:
        data = data.model_copy(update={"rubric_column": columns.rubric})
    data, train, heldout = _split(data)
    answers = [problem.answer for problem in (*train, *heldout) if problem.answer]
    reward = propose_reward(answers, judge=request.judge, has_rubrics=columns.rubric is not None)
    if reward is None:
        raise BadInput(
            f"{request.data}: no column has the name of an answer (such as answer, solution or label), so only a judge "
            "can rate the completions. Name a column with --answer-column, or a judge model with --judge. The other "
            f"columns are: {', '.join(columns.unused) or 'none'}."
        )
    directory = _validate(DirectoryPolicy, {"path": _locate(request.policy)}, option="--policy")
    policy = inspect_policy(directory, problem_texts(train))
    inputs = _Inputs(columns, data, train, heldout, policy, reward)
    data = data.model_copy(update=_instruct(inputs))
    return replace(inputs, data=data, train=load_problems(data, "train", 0), heldout=load_problems(data, "heldout", 0))


S = TypeVar("S", bound=Settings)


def _validate(kind: type[S], document: Mapping[str, object], *, option: str) -> S:
    """Validate a part of a configuration. Raises BadInput that names the command line option."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise BadInput(f"{option}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _locate(text: str) -> str:
    """Return the absolute path of a file or directory that exists on this machine. Other texts are returned unchanged,
    because they may be names on the Hub or addresses."""
    return str(Path(text).absolute()) if Path(text).exists() else text


def _split(data: FileData) -> tuple[FileData, list[Problem], list[Problem]]:
    """Return the data settings with the smallest held-out fraction that leaves problems in both splits, the training
    problems and the held-out problems."""
    if data.heldout_path is not None:
        return data, load_problems(data, "train", 0), load_problems(data, "heldout", 0)
    for fraction in FRACTIONS:
        chosen = data.model_copy(update={"heldout_fraction": fraction})
        with suppress(_EmptySplit):
            return chosen, _load(chosen, "train"), _load(chosen, "heldout")
    raise BadInput(f"{data.path}: the file has too few problems to keep some for evaluation. Add problems.")


class _EmptySplit(Exception):
    """Raised when a split contains no problems."""


def _load(data: FileData, split: str) -> list[Problem]:
    """Return the problems of a split. Raises _EmptySplit if there are none."""
    try:
        return load_problems(data, split, 0)
    except BadInput as error:
        if "data.heldout_fraction" in str(error):
            raise _EmptySplit from None
        raise


def _instruct(inputs: _Inputs) -> dict[str, str]:
    """Return the keys of `[data]` that add the reward's instruction (how to write the answer) to the prompts.

    A policy with a chat template receives it as the system message, which also turns plain prompts into chats. Other
    policies receive it after the prompt.
    """
    instruction, train = inputs.reward.instruction, inputs.train
    marker = _MARKERS.get(inputs.reward.kind, "")
    is_asked = bool(marker) and sum(marker in _text_of(problem) for problem in train) > len(train) / 2
    if inputs.columns.is_chat or inputs.is_chat:
        has_system = all(not isinstance(each.prompt, str) and each.prompt[0].role == "system" for each in train)
        if has_system or (is_asked and inputs.columns.is_chat):
            return {}
        return {} if inputs.columns.is_chat and not instruction else {"system": instruction or GREETING}
    return {"template": "{prompt}\n" if is_asked or not instruction else f"{{prompt}}\n\n{instruction}\n"}


def _text_of(problem: Problem) -> str:
    if isinstance(problem.prompt, str):
        return problem.prompt
    return "\n".join(message.text for message in problem.prompt)


def _measure(inputs: _Inputs) -> TextLengths:
    """Return the lengths of prompts and reference answers in tokens of the policy's tokenizer."""
    tokenizer, rules = inputs.policy.tokenizer, inputs.data.text_rules
    processor = inputs.policy.load_processor(inputs.data.pixels)
    train, heldout = (
        [len(prompt.input) for prompt in tokenize_problems(split, tokenizer, processor, rules=rules)]
        for split in (inputs.train, inputs.heldout)
    )
    answers = [problem.answer for problem in (*inputs.train, *inputs.heldout) if problem.answer]
    encoded = tokenizer(answers, add_special_tokens=False)["input_ids"] if answers else []
    return TextLengths(train, heldout, [len(tokens) for tokens in encoded])


def _describe(inputs: _Inputs, lengths: TextLengths, lora: Value | None) -> dict[str, str]:
    """Return descriptions of what was recognized and chosen, by label such as "reward"."""
    columns, data = inputs.columns, inputs.data
    names = columns.answers or tuple(filter(None, (columns.answer,)))
    answer = f"answers in {' and '.join(names)}" if names else "no answers"
    unused = f"; not used: {', '.join(columns.unused)}" if columns.unused else ""
    instruction = data.system or data.template.removeprefix("{prompt}").strip()
    return {
        "data": f"prompts in {columns.prompt}{' (chats)' if columns.is_chat else ''}, {answer}{unused}",
        "reward": f"{inputs.reward.kind}, because {inputs.reward.reason}",
        **({"instruction": instruction} if instruction else {}),
        "lengths": f"prompts have {min(lengths.prompts)} to {max(lengths.prompts)} tokens"
        + (f", answers {min(lengths.answers)} to {max(lengths.answers)}" if lengths.answers else ""),
        "training": "all weights" if lora is None else f"LoRA adapters of rank {lora.value}, because {lora.reason}",
    }


# ---- TOML
def _write_head(request: ProposalRequest, inputs: _Inputs, iterations: Value) -> Iterator[str]:
    yield "# Written by `rheostat init`. docs/configuration.md explains every key and its default."
    yield f"name = {_encode(request.name)}"
    yield _line("iterations", iterations)


def _write_data(request: ProposalRequest, inputs: _Inputs, *, too_long: int) -> Iterator[str]:
    data = inputs.data
    yield "\n# Problems. Relative paths start in the folder of this file."
    yield "[data]"
    yield 'kind = "file"'
    yield f"path = {_encode(_place(request.data, request.folder))}"
    for key in HUB_KEYS:
        if (value := getattr(request, key)) is not None:
            yield f"{key} = {_encode(value)}"
    yield f"prompt_column = {_encode(data.prompt_column)}"
    if data.answer_columns:
        yield f"answer_columns = {_encode(list(data.answer_columns))} # form the reference answer together"
    elif data.answer_column is None:
        yield 'answer_column = "" # the file has no reference answers'
    else:
        yield f"answer_column = {_encode(data.answer_column)} # reference answer"
    if data.rubric_column is not None:
        yield f"rubric_column = {_encode(data.rubric_column)} # criteria for the judge"
    if data.system is not None:
        yield f"system = {_encode(data.system)} # also makes plain prompts chats"
    if data.template != "{prompt}":
        yield f"template = {_encode(data.template)}"
    if data.heldout_path is None:
        yield f"heldout_fraction = {data.heldout_fraction} # share that is only used for evaluation"
    if too_long:
        problems = format_count(too_long, "problem that leaves", "problems that leave")
        yield f'on_too_long = "drop" # excludes {problems} no room for a completion'


def _write_policy(request: ProposalRequest, inputs: _Inputs) -> Iterator[str]:
    """Yield the lines of the policy, and a hint about training on the answers first.

    Numbers without `####` are no examples: the reward `numeric` gives 0 to a completion without this mark.
    """
    yield "\n[policy]"
    yield 'kind = "directory"'
    yield f"path = {_encode(_place(request.policy, request.folder))}"
    if inputs.reward.kind == "numeric" and not all("####" in each.answer for each in inputs.train):
        yield "\n# If most rewards are 0 at the start, train first on chats that end with #### and the number"
        yield "# ([warmup.chats])."
    else:
        yield "\n# If most rewards are 0 at the start, train on the answers first:"
        yield "# [warmup]"
        yield "# steps = 300"


def _write_rollout(prompts: Value, new_tokens: Value) -> Iterator[str]:
    yield "\n# Completions that each iteration generates."
    yield "[rollout]"
    yield _line("prompts", prompts)
    yield f"group_size = {GROUP_SIZE} # completions per prompt, whose rewards are compared with each other"
    yield "\n[rollout.sampling]"
    yield _line("max_new_tokens", new_tokens)


def _write_engine(update: UpdateConfig, batch_rows: Value | None) -> Iterator[str]:
    """Yield the lines about the engine that generates completions. Without a GPU, the defaults are used."""
    if batch_rows is None:
        return
    yield '\n# vLLM is faster: run `rheostat engine install vllm`, then set kind = "vllm" and remove max_batch_rows.'
    yield "[rollout.engine]"
    yield 'kind = "transformers"'
    yield f"dtype = {_encode(update.dtype)} # as in [update]"
    yield _line("max_batch_rows", batch_rows)


def _write_scoring(request: ProposalRequest, reward: RewardProposal) -> Iterator[str]:
    settings: dict[str, JsonValue] = {"kind": reward.kind, **reward.settings}
    if reward.kind == "judge" and request.judge is not None:
        settings["model"] = {"kind": "directory", "path": _place(request.judge, request.folder)}
    yield f"\n# Chosen because {reward.reason}. `rheostat rewards` lists all kinds."
    yield "[scoring]"
    yield f"rewards = [{_encode(settings)}]"


def _write_update(
    update: UpdateConfig, *, rate: Value, lora: Value | None, why_full: str, microbatch: Value
) -> Iterator[str]:
    yield f"\n# {_capitalize(why_full)}." if lora is None else ""
    yield "[update]"
    yield _line("learning_rate", rate)
    yield _line("microbatch_tokens", microbatch)
    if update.dtype != "float32":
        yield f"dtype = {_encode(update.dtype)}"
    if lora is not None:
        yield f"\n# Adapters are trained: {lora.reason}."
        yield "[update.lora]"
        yield f"rank = {lora.value}"


def _write_pools(machine: Machine) -> Iterator[str]:
    yield "\n[pools]"
    if machine.gpus:
        yield f"workers = {machine.gpus} # one for each GPU"
        yield "gpus_per_worker = 1"
        yield f"update_ranks = {machine.gpus}"
        yield "gpus_per_update_rank = 1"
        return
    workers = min(2, machine.cores)
    yield f"workers = {workers}"
    cores = format_count(machine.cores, "core")
    yield f"threads = {max(1, machine.cores // workers)} # {cores} divided among the workers"


def _write_evaluation(num_heldout: int, machine: Machine) -> Iterator[str]:
    problems = max(1, min(num_heldout, 256 if machine.gpus else 64))
    yield "\n[evaluation]"
    yield f"problems = {problems} # of {format_count(num_heldout, 'held-out problem')}, before and after training"


def _line(key: str, value: Value) -> str:
    number = value.value if isinstance(value.value, int) else f"{value.value:.0e}".replace("e-0", "e-")
    return f"{key} = {number} # {value.reason}"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _place(text: str, folder: str) -> str:
    """Return a path in the form in which the job contains it: relative to the job's folder, or unchanged if it is far
    from that folder or does not exist on this machine."""
    if not Path(text).exists():
        return text
    path = Path(text).absolute()
    relative = os.path.relpath(path, folder)
    return str(path) if relative.count("../") > MAX_STEPS_UP else relative


def _encode(value: JsonValue) -> str:
    """Return a value as TOML on one line.

    >>> _encode({"kind": "f1", "weight": 0.5, "a b": [True]})
    '{ kind = "f1", weight = 0.5, "a b" = [true] }'
    """
    match value:
        case Mapping():
            pairs = [
                f"{key if _BARE_KEY.fullmatch(key) else json.dumps(key)} = {_encode(each)}"
                for key, each in value.items()
            ]
            return f"{{ {', '.join(pairs)} }}"
        case list():
            return f"[{', '.join(map(_encode, value))}]"
        case _:
            return json.dumps(value, ensure_ascii=False)
