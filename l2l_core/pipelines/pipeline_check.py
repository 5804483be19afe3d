"""Check of a pipeline's plan: the rules of a training step, and the first action that breaks one."""

from __future__ import annotations

from l2l_core.pipelines.pipeline_plan import KINDS, PipelineAction, PipelineError, PipelinePlan


def check_pipeline(plan: PipelinePlan) -> None:
    """Check the plan of a training step.

    Every micro-batch runs forward and backward once in every stage. A stage stays on one rank unless weights are on the host,
    and every action can run at some time.

    Raises:
        PipelineError: it names the first action that breaks a rule, the rule, and a remedy.

    Example:
        >>> from l2l_core.pipelines import check_pipeline, gpipe
        >>> check_pipeline(gpipe(4, 8))
    """
    home: dict[int, int] = {}
    for rank, actions in enumerate(plan.ranks):
        for index, action in enumerate(actions):
            broken = _broken_rule(plan, action, (rank, index), home.setdefault(action.stage, rank))
            if broken:
                text = f"action {index} of rank {rank} ({action}): {broken[0]}. Remedy: {broken[1]}"
                raise PipelineError(rank, index, text)
    _check_complete(plan, home)
    for _ in plan.in_order():
        pass


def _broken_rule(
    plan: PipelinePlan, action: PipelineAction, place: tuple[int, int], home: int
) -> tuple[str, str] | None:
    """Return the rule that an action breaks, and the remedy."""
    (stage, kind, k), (rank, _), count = action, place, plan.micro_batches
    source = _local_source(plan, action)
    there = plan.place.get(source or action)
    split, moved = PipelineAction(stage, "I", k), f"move it to rank {there[0] if there else rank}"
    if plan.weights_on_host and kind in "BI":
        moved += f", or add {PipelineAction(stage, 'R', k)} before it"
    rules = [
        (kind not in KINDS, "there is no such kind of action", f"write a letter of {KINDS}"),
        (not 0 <= k < count, f"there are {count} micro-batches", f"name one from 0 to {count - 1}"),
        (plan.place[action] != place, "it is in the plan twice", "remove it"),
        (
            rank != home and not plan.weights_on_host,
            f"the weights of stage {stage} are on rank {home}",
            f"move it to rank {home}",
        ),
        (kind == "B" and split in plan.place, f"{split} is a part of the same backward", f"remove it, or {split}"),
        (there is None, f"it needs {source}, which is missing", f"add {source} before it"),
        (there is not None and there[0] != rank, f"it reads what {source} leaves on another rank", moved),
        (there is not None and there > place, f"it needs {source}, which runs later", f"move it behind {source}"),
    ]
    return next(((rule, remedy) for is_broken, rule, remedy in rules if is_broken), None)


def _local_source(plan: PipelinePlan, action: PipelineAction) -> PipelineAction | None:
    """Return the action that leaves on the same rank the tensors that this one reads."""
    stage, kind, k = action
    if kind == "W":
        return PipelineAction(stage, "I", k)
    if kind in "BI":
        return PipelineAction(stage, "R" if plan.recomputes(stage, k) else "F", k)
    # With weights on the host, the kept inputs are there too.
    return PipelineAction(stage, "F", k) if kind == "R" and not plan.weights_on_host else None


def _check_complete(plan: PipelinePlan, home: dict[int, int]) -> None:
    if not plan.stages:
        raise PipelineError(0, 0, "the plan has no action. Remedy: add 0F0 and 0B0 to rank 0")
    for stage in range(plan.stages):
        for k in range(plan.micro_batches):
            parts = "FIW" if PipelineAction(stage, "I", k) in plan.place else "FB"
            missing = [a for a in (PipelineAction(stage, kind, k) for kind in parts) if a not in plan.place]
            if missing:
                rank = home.get(stage, 0)
                text = f"at the end of rank {rank}: {missing[0]} is missing. Remedy: append {missing[0]}"
                raise PipelineError(rank, len(plan.ranks[rank]), text)
