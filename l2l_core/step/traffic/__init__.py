"""Copies between host and device during a step, and the device memory that they use.

May import `step.graph`, `eps`, `eps.blocks`, `devices`, `model`, `trace`, `schedule_rules`.
Begin reading at `lanes.py`, `weight_slots.py`, `stash.py`.
"""

from l2l_core.step.traffic.compute_events import ComputeClock as ComputeClock
from l2l_core.step.traffic.compute_events import MemoryMeter as MemoryMeter
from l2l_core.step.traffic.compute_events import MeterRecord as MeterRecord
from l2l_core.step.traffic.compute_events import StaleMeterError as StaleMeterError
from l2l_core.step.traffic.compute_events import time_event as time_event
from l2l_core.step.traffic.current_turn import NO_MICRO_BATCH as NO_MICRO_BATCH
from l2l_core.step.traffic.current_turn import CurrentTurn as CurrentTurn
from l2l_core.step.traffic.gradient_hooks import GradientHooks as GradientHooks
from l2l_core.step.traffic.gradient_slots import Gradient as Gradient
from l2l_core.step.traffic.gradient_slots import GradientRoutes as GradientRoutes
from l2l_core.step.traffic.gradient_slots import GradientSlots as GradientSlots
from l2l_core.step.traffic.lanes import Lane as Lane
from l2l_core.step.traffic.stash import Stash as Stash
from l2l_core.step.traffic.stash_mode import StashMode as StashMode
from l2l_core.step.traffic.stash_mode import raw_read_hook as raw_read_hook
from l2l_core.step.traffic.storage_tracker import StorageTracker as StorageTracker
from l2l_core.step.traffic.weight_slots import SlotStay as SlotStay
from l2l_core.step.traffic.weight_slots import WeightSlots as WeightSlots
