"""Simulation of training steps with other settings or plans, and pictures of the results; no widgets.

May import `pictures`, `readings`, `session`.
Begin reading at `question.py`, `answer.py`, `plan_simulation.py`.
"""

from workbench.what_if.answer import Answer as Answer
from workbench.what_if.answer import answer_question as answer_question
from workbench.what_if.answer import find_fitting_settings as find_fitting_settings
from workbench.what_if.answer import measured_answer as measured_answer
from workbench.what_if.assumed_costs import AssumedCosts as AssumedCosts
from workbench.what_if.assumed_costs import assumed_answer as assumed_answer
from workbench.what_if.depth_change import DepthEdit as DepthEdit
from workbench.what_if.depth_change import depth_edits as depth_edits
from workbench.what_if.differences import changed_settings as changed_settings
from workbench.what_if.differences import comparison_table as comparison_table
from workbench.what_if.differences import describe_differences as describe_differences
from workbench.what_if.differences import describe_forecast as describe_forecast
from workbench.what_if.differences import forecast_error as forecast_error
from workbench.what_if.differences import format_setting as format_setting
from workbench.what_if.forecast_margin import ComparedAnswer as ComparedAnswer
from workbench.what_if.forecast_margin import ForecastMargin as ForecastMargin
from workbench.what_if.forecast_margin import ForecastRecord as ForecastRecord
from workbench.what_if.forecast_margin import compare_with_step as compare_with_step
from workbench.what_if.measured_step import DepthFirstStep as DepthFirstStep
from workbench.what_if.measured_step import MeasuredStep as MeasuredStep
from workbench.what_if.plan_simulation import PlannedStep as PlannedStep
from workbench.what_if.plan_simulation import PlanSimulator as PlanSimulator
from workbench.what_if.plan_simulation import actions_of as actions_of
from workbench.what_if.plan_simulation import common_axis as common_axis
from workbench.what_if.plan_simulation import draw_plans as draw_plans
from workbench.what_if.plan_simulation import plans_table as plans_table
from workbench.what_if.plan_simulation import spans_of as spans_of
from workbench.what_if.question import CONFIG_FIELDS as CONFIG_FIELDS
from workbench.what_if.question import Question as Question
from workbench.what_if.step_cache import StepCache as StepCache
from workbench.what_if.what_if_picture import draw_what_if as draw_what_if
from workbench.what_if.what_if_picture import pictured_steps as pictured_steps
