"""Request for the proposal of a job, and the proposal, which two processes exchange. Torch-free."""

from infra.config import Settings


class ProposalRequest(Settings):
    """Request for a proposed job: the data, the policy, and the machine on which the job is to run."""

    name: str
    """Name of the run."""
    folder: str
    """Absolute path of the folder in which the job file will be stored. Local paths in the job are relative to this
    folder."""
    data: str
    """Path of the file of problems."""
    policy: str
    """Directory of the policy in Hugging Face format."""
    judge: str | None = None
    """Directory of a judge model, used if no rule can score the answers. None if there is no judge."""
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
