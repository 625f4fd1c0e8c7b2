"""Pairs of completions as a model reads them: whole completions for a policy, one last token for a reward model."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from infra.errors import BadInput
from models.batching import MicroBatch, TokenSequence, lay_out
from models.data import Preference
from models.roles.reward_model import encode, require_completion
from models.roles.supervised import example_sequences, sequence_of
from models.roles.tokenizer import render


@dataclass(frozen=True, slots=True)
class SequencePair:
    """The better and the worse completion of a prompt."""

    chosen: TokenSequence
    rejected: TokenSequence

    @property
    def size(self) -> int:
        """Tokens that the two take in a pass, padding included."""
        return 2 * max(len(self.chosen.tokens), len(self.rejected.tokens))


def policy_pairs(
    preferences: Sequence[Preference], tokenizer: PreTrainedTokenizerFast, *, context: int
) -> list[SequencePair]:
    """Tokenize prompts as for generation, and completions with EOS at their end."""
    source = f"preferences from {preferences[0].source}" if preferences else "preferences"
    examples = [(pair.prompt, text) for pair in preferences for text in (pair.chosen, pair.rejected)]
    sequences = example_sequences(examples, tokenizer, source=source)
    return _paired(preferences, sequences, context=context)


def reward_pairs(
    preferences: Sequence[Preference],
    tokenizer: PreTrainedTokenizerFast,
    *,
    template: str | None,
    context: int,
) -> list[SequencePair]:
    """Tokenize as for scoring; a model is asked for its number of the last token that is not padding."""
    require_completion(template, source="reward model")
    sequences: list[TokenSequence] = []
    for pair in preferences:
        prompt = render(pair.prompt, tokenizer, source=pair.source)
        for completion in (pair.chosen, pair.rejected):
            try:
                tokens = encode(tokenizer, template, prompt=prompt, completion=completion)
            except ValueError as error:
                raise BadInput(f"{pair.source}: {error}") from error
            sequences.append(_last_token(tokens, tokenizer.pad_token_id))
    return _paired(preferences, sequences, context=context + 1)


def lay_out_pairs(pairs: Sequence[SequencePair]) -> MicroBatch:
    """Lay out one pass: all chosen completions, then all rejected ones."""
    sequences = [*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)]
    return lay_out(sequences, [1.0] * len(sequences))


def _last_token(tokens: list[int], pad: int | None) -> TokenSequence:
    """Ask for the number of the last token: it is read where the token after it would be predicted, here anything."""
    read = len(tokens)
    while read and tokens[read - 1] == pad:
        read -= 1
    return sequence_of(tokens[:read], [0])


def _paired(
    preferences: Sequence[Preference], sequences: Sequence[TokenSequence], *, context: int
) -> list[SequencePair]:
    found = []
    for pair, chosen, rejected in zip(preferences, sequences[::2], sequences[1::2], strict=True):
        for name, sequence in (("chosen", chosen), ("rejected", rejected)):
            length = len(sequence.tokens)
            if not 0 < sequence.num_prompt_tokens < length <= context:
                raise BadInput(
                    f"{pair.source}: prompt and {name} completion have {length} tokens, expected at most {context}: "
                    "the policy's context"
                )
        found.append(SequencePair(chosen, rejected))
    return found
