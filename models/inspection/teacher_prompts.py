"""Checks of the prompts of teachers that do not read the tokens of the policy's prompts."""

from rheostat.infra.errors import BadInput
from rheostat.infra.store.inputs import fetch_path
from rheostat.models.config.teachers import TeacherDirectory, TeacherPolicy
from rheostat.models.data.problems import Problem
from rheostat.models.inspection.facts import InputFacts
from rheostat.models.text.privileged_prompts import build_privileged_prompt


def check_policy_teacher(teacher: TeacherPolicy, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a privileged prompt of a training problem cannot be built, has images, or leaves no room for a
    completion. Solution and feedback, which are not known yet, count as empty texts."""
    from rheostat.models.text.tokenizer import tokenize_prompts

    problems = _find_problems(facts, where)
    sources = [f"{where}: {each.source}" for each in problems]
    prompts = [
        build_privileged_prompt(each.prompt, teacher, answer=each.answer, columns=each.columns, source=source)
        for each, source in zip(problems, sources, strict=True)
    ]
    arguments, rules = [each.template for each in problems], facts.inputs.data.text_rules
    tokenized = tokenize_prompts(
        prompts, facts.tokenizer, sources=sources, processor=facts.processor, arguments=arguments, rules=rules
    )
    room = facts.policy.shape.context - facts.inputs.rollout.sampling.max_new_tokens
    for source, prompt in zip(sources, tokenized, strict=True):
        if not 0 < len(prompt.input) <= room:
            raise BadInput(
                f"{source}: the teacher's prompt has {len(prompt.input)} tokens, but it must have 1 to {room} (the "
                "policy's context minus rollout.sampling.max_new_tokens). Shorten the template, or lower "
                "max_new_tokens."
            )


def check_aligned_teacher(teacher: TeacherDirectory, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a teacher with another tokenizer cannot read the prompt of a training problem, because the
    prompt has images, its chat template rejects the prompt, or its context is too short."""
    if not teacher.aligns_text:
        return
    from rheostat.models.inspection.directory import inspect_directory
    from rheostat.models.text.tokenizer import tokenize_problems

    problems, inspected = _find_problems(facts, where), inspect_directory(fetch_path(teacher.path))
    data = facts.inputs.data
    try:
        processor = inspected.load_processor(data.pixels)
        tokenized = tokenize_problems(problems, inspected.tokenizer, processor, rules=data.text_rules)
    except BadInput as error:
        raise BadInput(f"{where}: the teacher cannot read the prompts of the policy: {error}") from error
    for problem, prompt in zip(problems, tokenized, strict=True):
        if not 0 < len(prompt.input) < inspected.shape.context:
            raise BadInput(
                f"{where}: {problem.source}: the prompt has {len(prompt.input)} tokens for the teacher, but it must "
                f"have 1 to {inspected.shape.context - 1}. Use a teacher with a longer context"
            )


def _find_problems(facts: InputFacts, where: str) -> list[Problem]:
    """Return the training problems of a teacher. Raises BadInput if the prompt of a problem has images."""
    distillation = facts.inputs.algorithm.distillation
    assert distillation is not None, "the teacher belongs to a distillation"
    index = [*distillation.teachers].index(where)
    problems = [each for each, _ in facts.prompts[0] if distillation.choose_teacher(each.columns) == index]
    for problem in problems:
        if problem.images:
            raise BadInput(
                f"{where}: {problem.source}: the prompt has images, but this teacher reads only text. Use a teacher of "
                "kind 'directory' with the policy's tokenizer."
            )
    return problems
