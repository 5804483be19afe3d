"""Random plans, for hypothesis."""

from hypothesis import strategies as st

from l2l_core.plan import ScheduleSettings, StepPlan


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Plans of regular models, with layers that are visited several times."""
    ahead, resident = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    offloads = draw(st.booleans())
    made = ScheduleSettings(
        micro_batches=draw(st.integers(1, 4)),
        ahead=ahead,
        slots=ahead + 1 + resident,
        kept_graphs=draw(st.integers(0, ahead + 1 + resident)),
        loss_per_micro_batch=draw(st.booleans()),
        offloads=offloads,
        later_turns=draw(st.sampled_from([0, 4])) if offloads and ahead else 0,
        announces_loads=draw(st.booleans()),
    )
    visits = draw(st.lists(st.sampled_from(["L000", "L001", "L002", "L003"]), max_size=6))
    visits = [layer for i, layer in enumerate(visits) if i == 0 or visits[i - 1] != layer]
    return StepPlan.expected(made, list(dict.fromkeys(visits)), visits)
