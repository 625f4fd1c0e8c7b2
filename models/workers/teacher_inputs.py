"""Sequences that some teachers read instead of the policy's: privileged prompts of the policy as its own teacher, and
texts in the tokens of a teacher with another tokenizer.

This module is used by update ranks. Every rank builds the same sequences.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from rheostat.infra.errors import BadInput
from rheostat.infra.store.bundles import fetch_bundle
from rheostat.infra.store.contracts import Store
from rheostat.infra.store.shards import ShardRef, read_shard
from rheostat.models.config.teachers import FEEDBACK, SOLUTION, Distillation, TeacherPolicy
from rheostat.models.data.problems import Message, Prompt, TemplateArguments
from rheostat.models.denoising.policy import policy_context
from rheostat.models.engines.requests import decode_texts, generation_settings, stated_ends
from rheostat.models.modeling.batching import Rows
from rheostat.models.records.columns import select_rows
from rheostat.models.records.model_input import ModelInput
from rheostat.models.records.schemas import FEEDBACK_COLUMN
from rheostat.models.records.work import EstimateWork
from rheostat.models.text.alignment import align_completion, build_byte_decoder
from rheostat.models.text.privileged_prompts import build_privileged_prompt
from rheostat.models.text.tokenizer import load_tokenizer, tokenize_prompts
from rheostat.models.text.turn_end import find_turn_end
from rheostat.models.training.auxiliary import TeacherSequence
from rheostat.models.vision.processor import VisionProcessor, load_processor
from rheostat.models.workers.prompt_chats import read_chats


class TeacherInputs:
    """Builder of the sequences of the teachers in one work unit."""

    def __init__(self, store: Store, work: EstimateWork, distillation: Distillation | None) -> None:
        self._store = store
        self._work = work
        self._teachers = [] if distillation is None else [*distillation.teachers.values()]
        self.metrics = dict[str, float]()
        """Number of completions that a teacher read after a privileged prompt (`privileged`), and number of completion
        tokens that are compared with a teacher with another tokenizer (`aligned`). Empty without such teachers."""

    def build(
        self, teacher: int, rows: Rows, rollouts: pa.Table, inputs: Sequence[ModelInput]
    ) -> dict[int, TeacherSequence]:
        """Return the sequences of one teacher by row of `rollouts`, whose model inputs are `inputs`. Empty if the
        teacher reads the policy's sequences. Raises BadInput if the work unit does not name the prompts or the
        teacher."""
        settings = self._teachers[teacher] if self._teachers else None
        if settings is not None and settings.privileged is not None:
            return self._build_privileged(settings.privileged, rows, rollouts, inputs)
        if settings is not None and settings.aligns_text:
            return self._build_aligned(teacher, rows, rollouts, inputs)
        return {}

    def _build_privileged(
        self, teacher: TeacherPolicy, rows: Rows, rollouts: pa.Table, inputs: Sequence[ModelInput]
    ) -> dict[int, TeacherSequence]:
        """Return the completions of the policy after privileged prompts.

        A row is omitted if the template has `{solution}` or `{feedback}`, but there is no text for any of these fields,
        or if its sequence would not fit into the policy's context. There is no solution if the row's group has no other
        completion with a sufficient reward.
        """
        directory = fetch_bundle(self._store, self._work.policy.weights)
        tokenizer, context = load_tokenizer(directory), policy_context(directory)
        solutions, feedback = dict[int, str](), dict[int, str]()
        if SOLUTION in teacher.fields:
            chosen = choose_solutions(rollouts, rows, self._read_rewards(), min_reward=teacher.min_reward)
            completions = [inputs[solution].completion.tolist() for solution in chosen.values()]
            solutions = dict(zip(chosen, decode_texts(tokenizer, completions), strict=True))
        if FEEDBACK in teacher.fields:
            feedback = self._read_feedback(rollouts, rows)
        prompt_rows = rollouts["prompt_row"].to_pylist()
        read = [row for row in rows if not teacher.score_fields or row in solutions or row in feedback]
        keys = {row: (prompt_rows[row], solutions.get(row, ""), feedback.get(row, "")) for row in read}
        prompts = self._tokenize(sorted({*keys.values()}), tokenizer, load_processor(directory), teacher)
        sequences = dict[int, TeacherSequence]()
        for row, key in keys.items():
            prompt = prompts[key]
            if 0 < len(prompt) <= context - inputs[row].num_completion_tokens:
                sequences[row] = TeacherSequence(prompt.append_completion(inputs[row].completion))
        self.metrics["privileged"] = self.metrics.get("privileged", 0.0) + len(sequences)
        return sequences

    def _build_aligned(
        self, teacher: int, rows: Rows, rollouts: pa.Table, inputs: Sequence[ModelInput]
    ) -> dict[int, TeacherSequence]:
        """Return the texts of all rows as tokens of the teacher, with the spans that are compared."""
        version = (self._work.teacher, *self._work.specialists)[teacher]
        if version is None:
            raise BadInput(f"iteration {self._work.iteration}: the work unit does not name the teacher's weights")
        policy, directory = (fetch_bundle(self._store, each.weights) for each in (self._work.policy, version))
        own, tokenizer, context = load_tokenizer(policy), load_tokenizer(directory), policy_context(directory)
        align = partial(
            align_completion,
            policy_bytes=cache(build_byte_decoder(own, where="the policy")),
            teacher_bytes=cache(build_byte_decoder(tokenizer, where="the teacher")),
            teacher=tokenizer,
            ends=frozenset({int(own.eos_token_id), *stated_ends(generation_settings(policy))}),
        )
        eos, stated = int(tokenizer.eos_token_id), stated_ends(generation_settings(directory))
        turn_end = find_turn_end(tokenizer, stated={eos, *stated})
        prompt_rows, chats = rollouts["prompt_row"].to_pylist(), self._read_chats()
        needed = [(row, "", "") for row in sorted({prompt_rows[row] for row in rows})]
        prompts = self._tokenize(needed, tokenizer, load_processor(directory))
        sequences = dict[int, TeacherSequence]()
        for row in rows:
            prompt, completion = prompts[prompt_rows[row], "", ""], inputs[row].completion.tolist()
            end = turn_end.token if turn_end is not None and chats[prompt_rows[row]][0] else eos
            aligned = align(completion, teacher_end=end, max_tokens=context - len(prompt))
            prompt = ModelInput.from_prompt(prompt.tokens[:context])
            sequences[row] = TeacherSequence(prompt.append_completion(aligned.tokens), aligned.spans)
            aligned_tokens = sum(each.stop - each.start for each, _ in aligned.spans)
            self.metrics["aligned"] = self.metrics.get("aligned", 0.0) + aligned_tokens
        return sequences

    def _tokenize(
        self,
        needed: Sequence[tuple[int, str, str]],
        tokenizer: PreTrainedTokenizerFast,
        processor: VisionProcessor | None,
        teacher: TeacherPolicy | None = None,
    ) -> dict[tuple[int, str, str], ModelInput]:
        """Return the prompts of a teacher by prompt row, solution and feedback. `processor` renders chats for models
        that also read images."""
        built = self._build_prompts(teacher, needed)
        tokenized = tokenize_prompts(
            [prompt for prompt, _ in built],
            tokenizer,
            sources=[f"prompt row {row}" for row, _, _ in needed],
            processor=processor,
            arguments=[arguments for _, arguments in built],
            rules=self._work.text_rules,
        )
        return dict(zip(needed, (each.input for each in tokenized), strict=True))

    def _build_prompts(
        self, teacher: TeacherPolicy | None, needed: Sequence[tuple[int, str, str]]
    ) -> list[tuple[Prompt, TemplateArguments]]:
        """Return the prompts with the arguments of the chat template, given prompt rows, solutions and feedback.
        Without a teacher of kind "policy", they are the prompts of the problems."""
        table, chats = read_shard(self._store, self._require_prompts()), self._read_chats()
        built: list[tuple[Prompt, TemplateArguments]] = []
        for row, solution, feedback in needed:
            messages, arguments = chats[row]
            prompt: Prompt = messages or table["text"][row].as_py()
            if teacher is not None:
                prompt = build_privileged_prompt(
                    prompt,
                    teacher,
                    answer=table["answer"][row].as_py(),
                    columns=json.loads(table["columns"][row].as_py()),
                    solution=solution,
                    feedback=feedback,
                    source=f"prompt row {row}",
                )
            built.append((prompt, arguments))
        return built

    def _require_prompts(self) -> ShardRef:
        """Return the shard of the prompts. Raises BadInput if the work unit does not name it."""
        if self._work.prompts is None:
            raise BadInput(f"iteration {self._work.iteration}: the work unit must name the prompts, but it does not")
        return self._work.prompts

    def _read_chats(self) -> list[tuple[tuple[Message, ...], TemplateArguments]]:
        """Return the messages and the arguments of the chat template of each prompt. A prompt of plain text has no
        messages."""
        return read_chats(self._store, self._require_prompts())

    def _read_rewards(self) -> dict[tuple[int, int], float]:
        """Return the total reward of each completion by prompt row and sample. Missing rewards are NaN."""
        return {place: math.nan if reward is None else reward for place, reward in self._read_scores("reward")}

    def _read_feedback(self, rollouts: pa.Table, rows: Rows) -> dict[int, str]:
        """Return the feedback on the completions of the rows. Rows without feedback, or with a blank one, are
        omitted."""
        texts = {place: text for place, text in self._read_scores(FEEDBACK_COLUMN) if text and text.strip()}
        places = [*zip(rollouts["prompt_row"].to_pylist(), rollouts["sample"].to_pylist(), strict=True)]
        return {row: texts[places[row]] for row in rows if places[row] in texts}

    def _read_scores(self, name: str) -> Iterator[tuple[tuple[int, int], Any]]:
        """Yield the prompt row and sample of each completion, with its value in a column of the scores."""
        for shard in self._work.shards:
            scores = select_rows(read_shard(self._store, shard.scores), shard.rows)
            prompt_rows, samples, values = (scores[each].to_pylist() for each in ("prompt_row", "sample", name))
            yield from zip(zip(prompt_rows, samples, strict=True), values, strict=True)


def choose_solutions(
    rollouts: pa.Table, rows: Rows, rewards: Mapping[tuple[int, int], float], *, min_reward: float
) -> dict[int, int]:
    """Return, for each of the rows, the row of the other completion of its group with the highest reward, if the reward
    is at least `min_reward`. If several have the highest reward, it is the one with the lowest sample number. A row
    without such a completion is omitted. `rewards` are by prompt row and sample."""
    names = [*zip(rollouts["prompt_row"].to_pylist(), rollouts["sample"].to_pylist(), strict=True)]
    chosen = dict[int, int]()
    for _, members in groupby(sorted(rows, key=lambda row: names[row]), key=lambda row: names[row][0]):
        group = [*members]
        solved = [row for row in group if rewards[names[row]] >= min_reward]
        ranked = sorted(solved, key=lambda row: (-rewards[names[row]], names[row][1]))
        for row in group:
            if others := [each for each in ranked if each != row]:
                chosen[row] = others[0]
    return chosen
