"""A reward that compares what was written with the reference answer by a retriever."""

from models.config.reward_terms import SimilarityReward
from models.retrieval.encoders import Retriever
from models.rewards.rules import Reward


def similarity_reward(config: SimilarityReward) -> Reward:
    """Compare embeddings: their cosine. Without a reference answer there is no score."""
    retriever = Retriever(config.retriever, "reward 'similarity': retriever")

    def reward(prompt: str, completion: str, answer: str) -> float:
        if not answer.strip():
            raise ValueError("no reference answer to compare with")
        return retriever.cosine(completion, answer)

    return reward
