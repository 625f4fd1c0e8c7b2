"""Judges behind endpoints."""

from models.config.engines import SamplingConfig
from models.config.judges import EndpointJudge as EndpointConfig
from models.config.judges import ScoreVerdict
from models.judges.endpoint import ChatJudge
from models.judges.verdicts import Question
from models.records.seeds import derive_seed

CANARY = "sk-canary-5f1b9c"


def judge_at(url, *, verdict=None, sampling=None, **changes):
    config = EndpointConfig(
        **{
            "base_url": url,
            "allowed_hosts": ("127.0.0.1",),
            "allow_private": True,
            "model": "judge",
            "backoff_seconds": 0.02,
            "timeout_seconds": 5,
            **changes,
        }
    )
    return ChatJudge(config, sampling=sampling or SamplingConfig(), verdict=verdict or ScoreVerdict())


def questions(count):
    return [Question(text=f"question {number}", seed=derive_seed("test", number)) for number in range(count)]
