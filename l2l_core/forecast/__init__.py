"""Forecasts of steps and searches for settings: costs from a rehearsal or a configuration, in bytes, seconds and words.

May import `simulator`, `analysis`, `shelf`, `step`, `eps`, `devices`, `batches`, `trace`, `rules`, `config`.
Begin reading at `forecast.py` and `from_costs.py`.
"""

from l2l_core.forecast.families import ModelShapes as ModelShapes
from l2l_core.forecast.families import shapes_of_config as shapes_of_config
from l2l_core.forecast.fit import Fit as Fit
from l2l_core.forecast.fit import NothingFits as NothingFits
from l2l_core.forecast.fit import Room as Room
from l2l_core.forecast.fit import WhatFits as WhatFits
from l2l_core.forecast.fit_config import ConfigFit as ConfigFit
from l2l_core.forecast.fit_config import fit_config as fit_config
from l2l_core.forecast.fit_step import fit_step as fit_step
from l2l_core.forecast.fit_step import layers_within as layers_within
from l2l_core.forecast.fit_step import room_of as room_of
from l2l_core.forecast.forecast import Forecast as Forecast
from l2l_core.forecast.forecast import ForecastCheck as ForecastCheck
from l2l_core.forecast.forecast import StepFigures as StepFigures
from l2l_core.forecast.from_config import forecast_config as forecast_config
from l2l_core.forecast.from_costs import Costs as Costs
from l2l_core.forecast.from_costs import on_shelf as on_shelf
from l2l_core.forecast.from_relay import LastStep as LastStep
from l2l_core.forecast.from_relay import forecast_step as forecast_step
from l2l_core.forecast.memory_walk import MemoryWalk as MemoryWalk
from l2l_core.forecast.memory_walk import WalkedTurn as WalkedTurn
from l2l_core.forecast.minimise import Priced as Priced
from l2l_core.forecast.minimise import Run as Run
from l2l_core.forecast.planned_shelf import OfShelf as OfShelf
from l2l_core.forecast.planned_shelf import PlannedShelf as PlannedShelf
from l2l_core.forecast.planned_shelf import built_shelf as built_shelf
from l2l_core.forecast.rehearsal import Rehearsal as Rehearsal
from l2l_core.forecast.stands import StandIn as StandIn
from l2l_core.forecast.stands import in_chunks as in_chunks
from l2l_core.forecast.stands import in_turn as in_turn
from l2l_core.forecast.stands import stack_of as stack_of
from l2l_core.forecast.stretch import Repeated as Repeated
from l2l_core.forecast.stretch import repeat as repeat
from l2l_core.forecast.what_fits import advise as advise
from l2l_core.forecast.what_fits import what_fits as what_fits
