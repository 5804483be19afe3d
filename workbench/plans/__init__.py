"""Steps by the plans of a lab, steered and seen as a session's; no widgets.

May import `session`, `readings`.
Begin reading at `lab_session.py` (what can be done), then `plan_choices.py` (the plans to choose from).
"""

from workbench.plans.lab_session import LabSession as LabSession
from workbench.plans.plan_choices import DEFAULT_STRATEGIES as DEFAULT_STRATEGIES
from workbench.plans.plan_choices import PlanChoice as PlanChoice
