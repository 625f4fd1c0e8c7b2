"""Request for the proposal of a job, and the proposal, which two processes exchange. Torch-free."""

from infra.config import Settings


class ProposalRequest(Settings):
    """Data and policy for which a job is proposed, and the machine on which it is to run."""

    name: str
    """Name of the run."""
    folder: str
    """Absolute path of the folder for the job. Local paths in the job are relative to this folder."""
    data: str
    """File of problems, or a dataset on the Hugging Face Hub."""
    policy: str
    """Directory of the policy in Hugging Face format, or the name of a model on the Hub."""
    judge: str | None = None
    """Directory or name of a judge, for answers that no rule can score."""
    config: str | None = None
    """Configuration (subset) of a dataset on the Hub."""
    split: str | None = None
    heldout_split: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    gpus: int = 0
    """Number of GPUs."""
    memory: int
    """Memory in bytes of one GPU, or of the machine without GPUs."""
    cores: int = 1
    """Number of CPU cores."""


class JobProposal(Settings):
    """Proposed job."""

    document: str
    """Text of the job file in TOML, with comments."""
    findings: dict[str, str]
    """Descriptions of what was recognized and chosen, by label such as "reward"."""
