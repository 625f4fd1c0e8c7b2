"""The decision to leave a stage as it is."""

from placement.records import Decision, DrainInputs, Memory


def unchanged(
    inputs: DrainInputs, reason: str, *, seconds: float | None = None, memory: Memory | None = None
) -> Decision:
    """Keep the plan; `seconds` to the end of the stage, by default what the plan expected."""
    if seconds is None:
        expected = inputs.memory.predicted_seconds
        seconds = max(0.0, (expected or inputs.elapsed_seconds) - inputs.elapsed_seconds)
    return Decision(
        plan=inputs.plan,
        predicted_seconds=seconds,
        unchanged_seconds=seconds,
        reason=reason,
        memory=memory or inputs.memory,
    )
