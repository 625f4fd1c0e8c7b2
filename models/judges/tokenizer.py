"""The tokenizer of a judge that a run trains. Torch-free."""

from collections.abc import Iterable
from itertools import chain

from transformers import PreTrainedTokenizerFast

from models.config.judges import JudgeReward
from models.config.policy import ScratchPolicy
from models.data.problems import Problem
from models.judges.prompts import question_about, verdict_texts
from models.text.tokenizer import train_tokenizer


def judge_tokenizer(
    judge: ScratchPolicy, reward: JudgeReward, problems: Iterable[Problem], *, seed: int
) -> PreTrainedTokenizerFast:
    """Train the tokenizer of a judge on its questions and verdicts, each as often: a verdict is one token then."""
    verdicts = verdict_texts(reward.verdict)
    questions = (question_about(p, p.worked or p.answer, reward=reward, seed=seed) for p in problems)
    texts = chain.from_iterable((question, *verdicts) for question in questions)
    return train_tokenizer(texts, vocab_size=judge.vocab_size, context=judge.context)
