"""Model inputs of process reward models: a prompt and the steps of a solution, each followed by the separator.

Each step and the separator are tokenized separately, as TRL's former PRMTrainer did. Therefore every step ends at a
token boundary, also if the tokenizer would merge the end of a step with the text after it. Torch-free.
"""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

from rheostat.infra.counts import format_count
from rheostat.infra.errors import BadInput
from rheostat.models.data.problems import NO_ARGUMENTS, Prompt, TemplateArguments
from rheostat.models.data.step_labels import LabeledSolution
from rheostat.models.records.model_input import ModelInput
from rheostat.models.text.control_tokens import ControlTokens
from rheostat.models.text.tokenizer import tokenize_prompts


def encode_steps(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    steps: Sequence[str],
    *,
    separator: str,
    source: str,
    arguments: TemplateArguments = NO_ARGUMENTS,
) -> ModelInput:
    """Encode a prompt and the steps of a solution. The prompt is encoded as for generation, and special tokens in the
    steps are ordinary text. White space at the end of a step is replaced by `separator`.

    Model outputs are read at the positions that predict completion tokens. The completion tokens of the result are
    therefore the tokens after the ends of the steps: the first token of the next step, and an arbitrary token (0) after
    the last step. Raises BadInput, which begins with `source`, if the prompt cannot be encoded or the separator has no
    tokens.
    """
    [tokenized] = tokenize_prompts([prompt], tokenizer, sources=[source], arguments=[arguments])
    between = tokenizer(separator, add_special_tokens=False)["input_ids"]
    if not between:
        raise BadInput(f"{source}: the tokenizer has no token for the separator {separator!r}. Set another separator.")
    encoded = ControlTokens.of(tokenizer).encode_completions([(step.rstrip(), "") for step in steps])
    first, *others = [[*tokens, *between] for tokens in encoded]
    model_input = ModelInput.from_prompt([*tokenized.input.tokens, *first])
    for tokens in others:
        model_input = model_input.append_completion(tokens[:1]).append_observation(tokens[1:])
    return model_input.append_completion([0])


def encode_solutions(
    solutions: Sequence[LabeledSolution],
    tokenizer: PreTrainedTokenizerFast,
    *,
    separator: str,
    context: int,
    drop_long: bool,
) -> list[tuple[ModelInput, tuple[float, ...]]]:
    """Encode labeled solutions for training, each with the labels of its steps. With `drop_long`, solutions of more
    than `context` tokens are left out. Raises BadInput if a solution is too long, or if none remains."""
    rows = []
    for each in solutions:
        model_input = encode_steps(
            tokenizer, each.prompt, each.steps, separator=separator, source=each.source, arguments=each.template
        )
        length = len(model_input) - 1
        if length <= context:
            rows.append((model_input, each.labels))
        elif not drop_long:
            raise BadInput(
                f"{each.source}: the prompt and the steps have {format_count(length, 'token')}, but the context of the "
                f"model is only {format_count(context, 'token')}. Shorten or remove the row, or add 'too_long' to "
                "labels.drop."
            )
    if not rows:
        raise BadInput(
            f"labels.drop with 'too_long' leaves no row: all {len(solutions)} rows from {solutions[0].source} have "
            f"more than {context} tokens, the model's context. Shorten the rows, or use a policy with a longer context."
        )
    return rows
