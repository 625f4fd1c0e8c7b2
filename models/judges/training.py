"""Examples that a small judge learns from: the data's problems with right and wrong completions. Torch-free."""

from random import Random

from infra.errors import BadInput
from models.config.data import DataConfig
from models.config.judges import ChoiceVerdict, JudgeReward, LogprobVerdict, VerdictConfig
from models.config.training import WarmupConfig
from models.data.arithmetic import right_completion, wrong_completion
from models.data.load import Example, load_problems
from models.data.problems import Problem, identity
from models.judges.prompts import question_text
from models.records.seeds import derive_seed


def judge_examples(data: DataConfig, reward: JudgeReward, warmup: WarmupConfig, seed: int) -> list[Example]:
    """Draw the examples of all training steps, in order: as many right completions as wrong ones."""
    right, wrong = verdict_texts(reward.verdict)
    problems = load_problems(data, "train", seed)
    if not all(problem.answer for problem in problems):
        raise BadInput("a judge is trained on right and wrong answers: set data.answer_column")
    rng = Random(f"{seed}/judge")
    examples: list[Example] = []
    for index in range(warmup.steps * warmup.batch_size):
        problem, is_right = rng.choice(problems), rng.random() < 0.5
        completion = right_completion(problem, rng) if is_right else wrong_completion(problem, problems, rng)
        question = question_about(problem, completion, reward=reward, seed=derive_seed("judge", seed, index))
        examples.append((question, right if is_right else wrong))
    return examples


def question_about(problem: Problem, completion: str, *, reward: JudgeReward, seed: int) -> str:
    """Return the question as the judge will see it."""
    return question_text(
        reward, prompt=identity(problem.prompt), completion=completion, answer=problem.answer, seed=seed
    )


def verdict_texts(verdict: VerdictConfig) -> tuple[str, str]:
    """Return what a judge answers about a right completion, and about a wrong one."""
    match verdict:
        case ChoiceVerdict():
            choices = verdict.choices
            return max(choices, key=lambda text: choices[text]), min(choices, key=lambda text: choices[text])
        case LogprobVerdict():
            return verdict.yes, verdict.no
        case _:
            raise BadInput(
                f"a trained judge answers with one of several texts: expected a verdict of kind choice or logprob, "
                f"found {verdict.kind}"
            )
