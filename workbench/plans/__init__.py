"""Session of a lab: steps by selectable plans, without widgets.

May import `session`, `readings`.
Begin reading at `lab_session.py` (commands), then `plan_choices.py` (plans to select).
"""

from workbench.plans.lab_session import LabSession as LabSession
from workbench.plans.plan_choices import DEFAULT_STRATEGIES as DEFAULT_STRATEGIES
from workbench.plans.plan_choices import PlanChoice as PlanChoice
