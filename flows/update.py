"""The update controller: all ranks learn from an iteration's samples."""

from prefect import flow

from flows.controllers import controller_name, serve
from flows.session import joined
from tasks.run.batch import Batch
from tasks.run.iteration import Iteration
from tasks.run.session import RunRef, Session
from tasks.run.stages import within
from tasks.update import update_policy


@flow(name="update", flow_run_name=controller_name, persist_result=True, result_serializer="json")
async def update(run: RunRef, batch: str | None = None) -> int:
    """Commit the next policy version; return how many versions were committed.

    Args:
        run: The run; without an epoch this flow takes it over.
        batch: `it-0003`, whose credit is in the store; none has it follow the run for some iterations.
    """
    async with joined(run) as session:
        if batch is None:
            return await serve(lambda batch, _: learn(session, batch))
        await learn(session, batch)
        return 1


async def learn(session: Session, batch: str) -> None:
    """Have the ranks learn from an iteration whose credit is in the store."""
    with within(batch):
        await update_policy(session, Iteration(session.run, Batch.read(session.run, batch).plan.number))
