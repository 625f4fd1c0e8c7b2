"""The models that an update rank keeps in memory: policy and critic to train, reference and teacher to compare with."""

from infra.store.bundles import fetch_bundle
from infra.store.storage import Store
from models.objectives.config import UpdateConfig
from models.records import PolicyVersion
from models.roles.adapters import load_trainable
from models.roles.critic import TokenValues, load_critic
from models.roles.learner import Learner
from models.roles.logprobs import TokenLogprobs
from models.roles.policy import load_policy
from models.roles.ranks import Ranks
from models.roles.teacher import load_teacher


class LoadedModels:
    """Each is loaded when it is first asked for, and again where another version is asked for."""

    def __init__(self, store: Store, update: UpdateConfig, *, temperature: float, ranks: Ranks) -> None:
        self.ranks = ranks
        self.policy = Learner(store, self._actor, update, ranks=ranks)
        self.critic = Learner(store, self._valuer, update, ranks=ranks)
        self._store = store
        self._update = update
        self._temperature = temperature
        self._reference: tuple[str, TokenLogprobs] | None = None
        self._teacher: tuple[str, TokenLogprobs] | None = None

    def reference(self, version: PolicyVersion) -> TokenLogprobs:
        """A policy that is compared with and never trained; it has no adapter."""
        if self._reference is None or self._reference[0] != version.digest:
            self._reference = None
            model = load_policy(fetch_bundle(self._store, version.weights)).requires_grad_(False).eval()
            policy = TokenLogprobs(model, temperature=self._temperature)
            self._reference = (version.digest, policy.to(self.ranks.device))
        return self._reference[1]

    def teacher(self, version: PolicyVersion) -> TokenLogprobs:
        """A model that is asked and never trained; every rank holds all of it."""
        if self._teacher is None or self._teacher[0] != version.digest:
            self._teacher = None
            directory = fetch_bundle(self._store, version.weights)
            teacher = load_teacher(
                directory, dtype=self._update.dtype, temperature=self._temperature, device=self.ranks.device
            )
            self._teacher = (version.digest, teacher)
        return self._teacher[1]

    def close(self) -> None:
        """Give the memory of what is trained back."""
        self.policy.close()
        self.critic.close()

    def _actor(self, version: PolicyVersion) -> TokenLogprobs:
        model = load_trainable(self._store, version, load=load_policy, lora=self._update.lora)
        return TokenLogprobs(model, temperature=self._temperature)

    def _valuer(self, version: PolicyVersion) -> TokenValues:
        return TokenValues(load_trainable(self._store, version, load=load_critic, lora=self._update.lora))
