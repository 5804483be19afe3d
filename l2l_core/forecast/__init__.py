"""Forecasts of steps and searches for settings, with costs from a rehearsal or from a configuration.

May import `simulator`, `shelf`, `step`, `step.traffic`, `eps`, `eps.optimizers`, `eps.blocks`, `devices`, `batches`,
`analysis`, `trace`, `config`, `schedule_rules`.
Begin reading at `forecast.py` and `cost_forecast.py`.
"""

from l2l_core.forecast.config_forecast import forecast_config as forecast_config
from l2l_core.forecast.cost_forecast import ForecastCosts as ForecastCosts
from l2l_core.forecast.cost_forecast import add_shelf_costs as add_shelf_costs
from l2l_core.forecast.fit_config import ConfigFit as ConfigFit
from l2l_core.forecast.fit_config import fit_config as fit_config
from l2l_core.forecast.fit_result import Fit as Fit
from l2l_core.forecast.fit_result import MemoryLimits as MemoryLimits
from l2l_core.forecast.fit_result import NothingFits as NothingFits
from l2l_core.forecast.fit_result import WhatFits as WhatFits
from l2l_core.forecast.forecast import Forecast as Forecast
from l2l_core.forecast.forecast import ForecastCheck as ForecastCheck
from l2l_core.forecast.forecast import StepFigures as StepFigures
from l2l_core.forecast.memory_timeline import MemoryTimeline as MemoryTimeline
from l2l_core.forecast.memory_timeline import TurnMemory as TurnMemory
from l2l_core.forecast.minimise import Priced as Priced
from l2l_core.forecast.minimise import Run as Run
from l2l_core.forecast.model_shapes import ModelShapes as ModelShapes
from l2l_core.forecast.model_shapes import read_model_shapes as read_model_shapes
from l2l_core.forecast.profile_transforms import RepeatedStay as RepeatedStay
from l2l_core.forecast.profile_transforms import repeat_stays as repeat_stays
from l2l_core.forecast.rehearsal import Rehearsal as Rehearsal
from l2l_core.forecast.relay_fit import fit_step as fit_step
from l2l_core.forecast.relay_fit import layers_within as layers_within
from l2l_core.forecast.relay_fit import memory_limits_of as memory_limits_of
from l2l_core.forecast.relay_forecast import forecast_step as forecast_step
from l2l_core.forecast.relay_forecast import last_recording as last_recording
from l2l_core.forecast.representatives import RepresentedLayer as RepresentedLayer
from l2l_core.forecast.representatives import chunk_stack as chunk_stack
from l2l_core.forecast.representatives import cycle_middle as cycle_middle
from l2l_core.forecast.representatives import resize_stack as resize_stack
from l2l_core.forecast.shelf_costs import PlannedShelf as PlannedShelf
from l2l_core.forecast.shelf_costs import ShelfForecast as ShelfForecast
from l2l_core.forecast.shelf_costs import relay_shelf_costs as relay_shelf_costs
from l2l_core.forecast.what_fits import advise as advise
from l2l_core.forecast.what_fits import what_fits as what_fits
