"""Reward for semantic similarity: a retriever embeds the completion and the reference answer."""

from rheostat.models.config.reward_terms import SimilarityReward
from rheostat.models.retrieval.encoders import Retriever
from rheostat.models.rewards.rules import Reward


def similarity_reward(config: SimilarityReward) -> Reward:
    """Return a reward function whose score is the cosine similarity between the embeddings of completion and reference
    answer.

    The score is missing if there is no reference answer. Raises BadInput if the retriever that embeds texts cannot be
    loaded.
    """
    retriever = Retriever(config.retriever, "reward 'similarity': retriever")

    def reward(prompt: str, completion: str, answer: str) -> float:
        """Return the cosine similarity of completion and answer. Raises ValueError if the reference answer is blank."""
        if not answer.strip():
            raise ValueError(
                "the reward 'similarity' compares completions with the reference answer, but the reference answer of "
                "this problem is empty. Fill it in, or set data.answer_column to the column with the answers"
            )
        return retriever.cosine(completion, answer)

    return reward
