"""Calls with plain data, for tables of refused input: each builds the objects that the function under test takes."""

from pathlib import Path

import torch

from rheostat.models.config.retriever import PairFile, RetrieverConfig
from rheostat.models.denoising.samplers import NoiseSchedule, ddim_schedule
from rheostat.models.retrieval.pairs import PairSet, load_pairs


def load_retriever_pairs(**columns: str) -> PairSet:
    """Load the pairs of `p.jsonl` in the current directory."""
    source = PairFile(path=Path("p.jsonl").absolute(), **columns)
    return load_pairs(RetrieverConfig(pairs=source, heldout_fraction=0.01))


def build_ddim_schedule(steps: int, last_alpha: float, **options: object) -> NoiseSchedule:
    """Build a schedule of a model that was trained on 1000 timesteps."""
    return ddim_schedule(steps, torch.linspace(0.99, last_alpha, 1000), set_alpha_to_one=True, **options)
