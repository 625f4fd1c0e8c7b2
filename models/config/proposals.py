"""Request for the proposal of a job, and the proposal, which two processes exchange. Torch-free."""

from rheostat.infra.config import Settings


class ProposalRequest(Settings):
    """Request for a proposed job: the data, the policy, and the machine on which the job is to run."""

    name: str
    """Name of the run."""
    folder: str
    """Absolute path of the folder in which the job file will be stored. Local paths in the job are relative to this
    folder."""
    data: str
    """Path of the file of problems, or the name of a dataset on the Hugging Face Hub."""
    policy: str
    """Directory of the policy in Hugging Face format, or the name of a model on the Hub."""
    judge: str | None = None
    """Directory of a judge model, or its name on the Hub. Used if no rule can score the answers. None without a
    judge."""
    config: str | None = None
    """Configuration (subset) of the dataset on the Hub."""
    split: str | None = None
    """Split of the dataset on the Hub that contains the training problems."""
    heldout_split: str | None = None
    """Split of the dataset on the Hub that contains the held-out problems."""
    prompt_column: str | None = None
    answer_column: str | None = None
    gpus: int = 0
    """Number of GPUs of the machine."""
    memory: int
    """Memory in bytes: that of one GPU, or that of the machine if it has no GPU."""
    cores: int = 1
    """Number of CPU cores of the machine."""


class JobProposal(Settings):
    """Proposed job file, with an explanation of the choices."""

    document: str
    """Text of the job file in TOML, with comments."""
    findings: dict[str, str]
    """Descriptions of what was recognized in the data and chosen for the job, by label such as "reward"."""
