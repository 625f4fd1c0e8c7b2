"""Flow that trains a retriever: pairs, a self-distilled dual encoder, and a cross-encoder as its teacher if that is
better."""

from prefect import flow

from flows.endings import tell_endings
from models.config.retriever import RetrieverConfig
from models.records.retrievals import MadeRetriever
from tasks.retriever import (
    asks_teacher,
    choose,
    first_terms,
    hold_retriever,
    made_before,
    make_pairs,
    teaches,
    train_cross_encoder,
    train_student,
    with_recorded_defaults,
)


@flow(name="retriever", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def retriever(config: RetrieverConfig) -> MadeRetriever:
    """Train a retriever and evaluate it on held-out queries. If started again, it continues from the store.

    Args:
        config: Pairs, encoders and method.
    """
    tell_endings()
    config = with_recorded_defaults(config)
    if (done := made_before(config)) is not None:
        return done
    async with hold_retriever(config) as making:
        pairs = await make_pairs(making)
        student = await train_student(making, pairs, first_terms(config))
        if not asks_teacher(config):
            return await choose(making, [student])
        teacher = await train_cross_encoder(making, pairs, student)
        if not teaches(config, student, teacher):
            return await choose(making, [student], teacher)
        taught = await train_student(making, pairs, "cascade", teacher)
        return await choose(making, [student, taught], teacher)
