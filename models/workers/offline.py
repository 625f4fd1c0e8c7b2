"""Training on examples that no policy of the run wrote: supervised warm-up of policies and judges."""

import time
from collections.abc import Callable, Sequence

from infra.bundles import fetch_bundle
from infra.storage import Store
from models.config import WarmupConfig
from models.data import Example, warmup_examples
from models.judges.training import judge_examples
from models.objectives.config import UpdateConfig
from models.records import Outcome, PolicyVersion
from models.roles.learner import Learner
from models.roles.logprobs import TokenLogprobs
from models.roles.policy import load_policy
from models.roles.ranks import Ranks
from models.roles.supervised import imitate
from models.work import JudgeWarmupWork, WarmupWork


class OfflineTrainer:
    """Train models that the run starts from; every rank holds one and they act together.

    Each piece of work begins with a fresh optimizer and publishes a version without state.
    """

    def __init__(self, store: Store, update: UpdateConfig, *, ranks: Ranks, beat: Callable[[], None]) -> None:
        self._store = store
        self._update = update
        self._ranks = ranks
        self._beat = beat

    def warmup(self, work: WarmupWork) -> Outcome:
        """Imitate worked examples."""
        return self._imitate(work.policy, warmup_examples(work.data, work.warmup, work.seed), work.warmup)

    def warm_judge(self, work: JudgeWarmupWork) -> Outcome:
        """Train a judge on right and wrong completions."""
        return self._imitate(work.judge, judge_examples(work.data, work.reward, work.warmup, work.seed), work.warmup)

    def _imitate(self, model: PolicyVersion, examples: Sequence[Example], warmup: WarmupConfig) -> Outcome:
        clock = time.perf_counter
        begun = clock()
        learner = Learner(self._store, self._logprobs, self._update, ranks=self._ranks)
        trainer = learner.begin_at(model)
        loaded = clock()
        metrics = imitate(
            trainer,
            examples,
            warmup=warmup,
            directory=fetch_bundle(self._store, model.weights),
            microbatch_tokens=self._update.microbatch_tokens,
            ranks=self._ranks,
            beat=self._beat,
        )
        stepped = clock()
        policy = learner.publish(model, version=model.version, with_state=False)
        learner.close()
        timings = {"load": loaded - begun, "steps": stepped - loaded, "save": clock() - stepped}
        return Outcome(policy=policy, metrics=metrics, timings=timings)

    def _logprobs(self, version: PolicyVersion) -> TokenLogprobs:
        return TokenLogprobs(load_policy(fetch_bundle(self._store, version.weights)), temperature=1.0)
