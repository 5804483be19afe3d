"""Steps by the plans of a lab, steered and seen as a session's; no widgets.

May import `session`, `readings`.
Begin reading at `lab_session.py` (what can be done), then `choices.py` (the plans to choose from).
"""

from workbench.plans.choices import WAYS as WAYS
from workbench.plans.choices import Choice as Choice
from workbench.plans.lab_session import LabSession as LabSession
