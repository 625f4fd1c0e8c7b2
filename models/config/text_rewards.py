"""Configuration of ready-made rewards for texts: agreement with a reference, format, length, repetition, language
and instructions. Torch-free."""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from rheostat.models.config.reward_terms import BuiltInReward


class ReferenceReward(BuiltInReward):
    """Fields common to rewards that compare the text of the completion with the reference answer."""

    checks_references = True

    reference_separator: str | None = None
    """Text between alternative references in a reference answer, such as `" ||| "`. The alternative with the highest
    score counts. If not set, the whole answer is one reference."""


class GradedReferenceReward(ReferenceReward):
    """Fields common to reference rewards whose score can have any value from 0 to 1."""

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values: always true, because it can be any value from 0 to
        1."""
        return True


class ExactMatchReward(ReferenceReward):
    """Reward of 1 if the completion equals the reference answer, else 0. White space at both ends is ignored."""

    implementation = "rheostat.models.rewards.references:exact_match_reward"
    example = '{ kind = "exact_match", normalize = "squad" }'

    kind: Literal["exact_match"] = "exact_match"
    normalize: Literal["nothing", "squad"] = "nothing"
    """Normalization of both texts before the comparison: "squad" ignores letter case, punctuation, English articles and
    the amount of white space, like the evaluation of SQuAD (arXiv 1606.05250)."""


class F1Reward(GradedReferenceReward):
    """F1 score, from 0 to 1, of the words that the completion has in common with the reference, like the evaluation of
    SQuAD (arXiv 1606.05250). Letter case, punctuation and English articles are ignored."""

    implementation = "rheostat.models.rewards.references:f1_reward"
    example = '{ kind = "f1", reference_separator = " ||| " }'

    kind: Literal["f1"] = "f1"


class RougeReward(GradedReferenceReward):
    """ROUGE score of the completion against the reference, from 0 to 1, computed by the package rouge-score (Lin 2004).
    Requires `pip install 'rheostat[texts]'`."""

    implementation = "rheostat.models.rewards.references:rouge_reward"
    example = '{ kind = "rouge", variant = "rougeL" }'

    kind: Literal["rouge"] = "rouge"
    variant: Literal["rouge1", "rouge2", "rougeL", "rougeLsum"] = "rougeL"
    """Unit of comparison: single words (rouge1), pairs of words (rouge2), the longest common subsequence (rougeL), or
    this subsequence line by line (rougeLsum)."""
    value: Literal["f1", "precision", "recall"] = "f1"
    """Score: share of the completion's units that the reference contains (precision), share of the reference's units
    that the completion contains (recall), or their harmonic mean."""
    stemming: bool = False
    """Whether the endings of English words are removed before the comparison (Porter stemmer)."""


class BleuReward(GradedReferenceReward):
    """BLEU score of the completion against the reference, from 0 to 1, computed by the package sacrebleu (Papineni et
    al. 2002). Requires `pip install 'rheostat[texts]'`.

    A completion with fewer than 4 words is compared by the longest word sequences that it has.
    """

    implementation = "rheostat.models.rewards.references:bleu_reward"
    example = '{ kind = "bleu" }'

    kind: Literal["bleu"] = "bleu"
    tokenize: Literal["13a", "intl", "char", "zh", "none"] = "13a"
    """Method by which sacrebleu divides texts into words. "char" compares characters, "zh" is for Chinese, and "none"
    divides at white space."""


class JsonSchemaReward(BuiltInReward):
    """Reward of 1 if the completion is a JSON document that conforms to a JSON schema, else 0.

    If the completion contains code blocks (three backticks), the last one is read, else the whole completion. A
    repeated key of an object counts as invalid JSON.
    """

    implementation = "rheostat.models.rewards.formats:json_schema_reward"
    checks_references = True
    example = '{ kind = "json_schema", json_schema = { type = "object", required = ["name"] } }'

    kind: Literal["json_schema"] = "json_schema"
    json_schema: dict[str, JsonValue] | None = None
    """JSON schema that applies to all problems. If not set, the reference answer of each problem is its JSON schema, as
    text. A schema without `$schema` is read as draft 2020-12."""


class LengthReward(BuiltInReward):
    """Reward of 1 if the length of the completion is within the limits. Beyond the limits the reward falls linearly,
    and is 0 at a distance of `margin`."""

    implementation = "rheostat.models.rewards.formats:length_reward"
    example = '{ kind = "length", max_length = 200, margin = 100 }'

    kind: Literal["length"] = "length"
    unit: Literal["words", "characters", "lines"] = "words"
    """Unit in which the length is counted. Words are separated by white space. Lines without text are not counted."""
    min_length: Annotated[int, Field(ge=0)] = 0
    """Minimum length of a completion that gets the full reward, counted in `unit`."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Maximum length of a completion that gets the full reward, counted in `unit`. If not set, there is no maximum."""
    margin: Annotated[int, Field(ge=0)] = 0
    """Distance from the limits at which the reward reaches 0, counted in `unit`. With 0, every length beyond the limits
    gets 0."""

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values. This is the case if `margin` is 2 or more."""
        return self.margin > 1

    @model_validator(mode="after")
    def _require_limits(self) -> Self:
        if not self.min_length and self.max_length is None:
            raise ValueError(
                "at least one of min_length and max_length must be set, because every length would get the same "
                "reward otherwise"
            )
        if self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(
                f"min_length is {self.min_length}, but max_length is only {self.max_length}. Raise max_length, or "
                "lower min_length"
            )
        return self


class RepetitionReward(BuiltInReward):
    """Share of distinct word sequences among all word sequences of the completion, from 0 to 1 (distinct-n, arXiv
    1510.03055). Repeated text lowers the score. A completion that is shorter than one sequence gets 1."""

    implementation = "rheostat.models.rewards.formats:repetition_reward"
    example = '{ kind = "repetition", words = 4, weight = 0.2 }'

    kind: Literal["repetition"] = "repetition"
    words: Annotated[int, Field(ge=1)] = 4
    """Number of words in a word sequence, n."""

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values. This is always true for a share."""
        return True


class LanguageReward(BuiltInReward):
    """Reward of 1 if the completion is in the wanted language, else 0. The package py3langid detects the language.
    Requires `pip install 'rheostat[texts]'`. A completion without letters gets 0."""

    implementation = "rheostat.models.rewards.formats:language_reward"
    checks_references = True
    example = '{ kind = "language", language = "en" }'

    kind: Literal["language"] = "language"
    language: Annotated[str, Field(pattern="^[a-z]{2,3}$")] | None = None
    """ISO 639 code of the language, such as "en", for all problems. If not set, the reference answer of each problem is
    the code."""


class IfevalReward(BuiltInReward):
    """Share of the instructions that the completion follows, such as a minimum number of words or no commas (IFEval,
    arXiv 2311.07911). The reference answer lists the instructions of the problem.

    Reference answers have the form of google/IFEval or of allenai/RLVR-IFeval, as JSON. For the first form set
    `data.answer_columns = ["instruction_id_list", "kwargs"]`. Instructions about the language require `pip install
    'rheostat[texts]'`.
    """

    implementation = "rheostat.models.rewards.ifeval:ifeval_reward"
    checks_references = True
    example = '{ kind = "ifeval", score = "all" }'

    kind: Literal["ifeval"] = "ifeval"
    score: Literal["fraction", "all"] = "fraction"
    """Score of a completion: "fraction" is the share of the instructions that the completion follows, "all" is 1 if the
    completion follows all instructions, else 0."""
    responses: Literal["strict", "loose"] = "strict"
    """Texts in which the instructions are checked: "strict" checks the completion as it is. "loose" also accepts it if
    the instructions are followed without its first or last line or without asterisks, like the loose accuracy of
    IFEval."""

    @property
    def is_graded(self) -> bool:
        """Whether the score can have more than two different values. This is the case if `score` is "fraction"."""
        return self.score == "fraction"


TextReward = (
    ExactMatchReward
    | F1Reward
    | RougeReward
    | BleuReward
    | JsonSchemaReward
    | LengthReward
    | RepetitionReward
    | LanguageReward
    | IfevalReward
)
