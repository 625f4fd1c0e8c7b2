"""Flow that trains a retriever: training pairs, a self-distilled dual encoder, and a cross-encoder, which teaches the
dual encoder if it is more accurate."""

from prefect import flow

from rheostat.flows.prefect_states import install_state_handling
from rheostat.models.config.retriever import RetrieverConfig
from rheostat.models.records.retrievals import TrainedRetriever
from rheostat.tasks.retriever import (
    find_finished,
    first_training_method,
    lock_retriever,
    make_pairs,
    select_retriever,
    should_teach,
    train_cross_encoder,
    train_student,
    trains_teacher,
    with_recorded_defaults,
)


@flow(name="retriever", flow_run_name="{config.name}", persist_result=True, result_serializer="json")
async def retriever(config: RetrieverConfig) -> TrainedRetriever:
    """Train a retriever and evaluate it on held-out queries. If the flow is started again, it continues from the
    results in the store.

    Args:
        config: Pairs, encoders and method.
    """
    install_state_handling()
    config = with_recorded_defaults(config)
    if (done := find_finished(config)) is not None:
        return done
    async with lock_retriever(config) as opened:
        pairs = await make_pairs(opened)
        student = await train_student(opened, pairs, first_training_method(config))
        if not trains_teacher(config):
            return await select_retriever(opened, [student])
        teacher = await train_cross_encoder(opened, pairs, student)
        if not should_teach(config, student, teacher):
            return await select_retriever(opened, [student], teacher)
        second_student = await train_student(opened, pairs, "cascade", teacher)
        return await select_retriever(opened, [student, second_student], teacher)
