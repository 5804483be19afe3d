"""Session of a lab, with steps by selectable plans, and a step's plan under edit; without widgets.

May import `session`, `readings`.
Begin reading at `lab_session.py` (commands), then `plan_choices.py` (plans to select); `plan_draft.py` stands alone.
"""

from workbench.plans.lab_session import LabSession as LabSession
from workbench.plans.plan_choices import DEFAULT_STRATEGIES as DEFAULT_STRATEGIES
from workbench.plans.plan_choices import PlanChoice as PlanChoice
from workbench.plans.plan_draft import PlanDraft as PlanDraft
from workbench.plans.plan_draft import PlanLine as PlanLine
from workbench.plans.plan_draft import describe as describe
