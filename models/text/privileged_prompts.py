"""Prompts with privileged information, which the policy reads as its own teacher. Torch-free."""

from collections.abc import Mapping
from dataclasses import replace

from pydantic import JsonValue

from rheostat.infra.errors import BadInput
from rheostat.infra.plugins import nearest_name
from rheostat.models.config.teachers import FEEDBACK, SOLUTION, TeacherPolicy, encode_value
from rheostat.models.data.problems import Prompt


def build_privileged_prompt(
    prompt: Prompt,
    teacher: TeacherPolicy,
    *,
    answer: str,
    columns: Mapping[str, JsonValue],
    solution: str = "",
    feedback: str = "",
    source: str,
) -> Prompt:
    """Return the prompt that the teacher reads instead of `prompt`: plain text is replaced by the filled template, and
    in a chat, the last user message is replaced.

    `answer`, `columns`, `solution` and `feedback` are the values of the template's fields, and `source` is the origin
    of the prompt in messages. Raises BadInput if the template has an unknown field or one that is also a column, or if
    a chat does not end with a message of the user.
    """
    text = prompt if isinstance(prompt, str) else prompt[-1].text
    values = {name: encode_value(value) for name, value in columns.items()}
    own = {"prompt": text, "answer": answer, SOLUTION: solution, FEEDBACK: feedback}
    for name in {*own} & {*teacher.fields} & {*values}:
        if name != "answer" or values[name] != answer:
            raise BadInput(
                f"{source}: the teacher's template has the field {{{name}}}, which has another meaning than the column "
                f"{name!r} of the problem. Rename the column, or remove it from environment_columns of the data"
            )
    values |= own
    for name in teacher.fields:
        if name not in values:
            raise BadInput(
                f"{source}: the teacher's template has the field {{{name}}}, but the problem has no column "
                f"{name!r}{nearest_name(name, values)}. Known fields are {', '.join(sorted(values))}. Correct the "
                "template, or list the column in environment_columns of the data"
            )
    filled = teacher.fill_template(values)
    if isinstance(prompt, str):
        return filled
    if prompt[-1].role != "user":
        raise BadInput(
            f"{source}: the last message of the chat has the role {prompt[-1].role!r}, but the teacher's template "
            "replaces a message of the user. Use chats that end with a message of the user, or another teacher"
        )
    return (*prompt[:-1], replace(prompt[-1], content=filled))
