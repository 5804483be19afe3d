"""Schedules as data: actions, the generators that yield them, and plans that can be printed, read and checked.

Imports nothing, not even torch. Begin reading at `actions.py`, then `relay_schedule.py` and `step_plan.py`.
"""

from l2l_core.plan.actions import KINDS as KINDS
from l2l_core.plan.actions import SHELL as SHELL
from l2l_core.plan.actions import Action as Action
from l2l_core.plan.actions import ActionResult as ActionResult
from l2l_core.plan.actions import Actions as Actions
from l2l_core.plan.actions import Keep as Keep
from l2l_core.plan.actions import Turn as Turn
from l2l_core.plan.check import check_plan as check_plan
from l2l_core.plan.relay_schedule import RelaySchedule as RelaySchedule
from l2l_core.plan.relay_schedule import ScheduleSettings as ScheduleSettings
from l2l_core.plan.schedule_parts import SlotTable as SlotTable
from l2l_core.plan.schedule_parts import StepVisit as StepVisit
from l2l_core.plan.schedule_parts import serial as serial
from l2l_core.plan.schedule_parts import visits_of_step as visits_of_step
from l2l_core.plan.slot_choice import SlotChoice as SlotChoice
from l2l_core.plan.slot_choice import forward_then_backward as forward_then_backward
from l2l_core.plan.step_plan import PlanError as PlanError
from l2l_core.plan.step_plan import ScheduleFunction as ScheduleFunction
from l2l_core.plan.step_plan import StepPlan as StepPlan
from l2l_core.plan.step_plan import schedule_name as schedule_name
