"""Check of a teacher that is the policy with a privileged prompt."""

from rheostat.infra.errors import BadInput
from rheostat.models.config.teachers import TeacherPolicy
from rheostat.models.inspection.facts import InputFacts
from rheostat.models.text.privileged_prompts import build_privileged_prompt


def check_policy_teacher(teacher: TeacherPolicy, facts: InputFacts, where: str) -> None:
    """Raise BadInput if a privileged prompt of a training problem cannot be built, has images, or leaves no room for a
    completion. The solution, which is not known yet, counts as an empty text."""
    from rheostat.models.text.tokenizer import tokenize_prompts

    distillation = facts.inputs.algorithm.distillation
    assert distillation is not None, "the teacher belongs to a distillation"
    index = [*distillation.teachers].index(where)
    problems = [each for each in facts.train if distillation.choose_teacher(each.columns) == index]
    sources = [f"{where}: {each.source}" for each in problems]
    for problem, source in zip(problems, sources, strict=True):
        if problem.images:
            raise BadInput(f"{source}: the prompt has images, but privileged prompts are texts. Use another teacher.")
    prompts = [
        build_privileged_prompt(each.prompt, teacher, answer=each.answer, columns=each.columns, source=source)
        for each, source in zip(problems, sources, strict=True)
    ]
    arguments, rules = [each.template for each in problems], facts.inputs.data.text_rules
    tokenized = tokenize_prompts(prompts, facts.tokenizer, sources=sources, arguments=arguments, rules=rules)
    room = facts.policy.shape.context - facts.inputs.rollout.sampling.max_new_tokens
    for source, prompt in zip(sources, tokenized, strict=True):
        if not 0 < len(prompt.input) <= room:
            raise BadInput(
                f"{source}: the teacher's prompt has {len(prompt.input)} tokens, but it must have 1 to {room} (the "
                "policy's context minus rollout.sampling.max_new_tokens). Shorten the template, or lower "
                "max_new_tokens."
            )
