"""Simulation of a step: costs, recorded from a trace or computed from shapes, are replayed on a virtual clock.

May import `shelf`, `workers`, `eps.blocks`, `devices`, `plan`, `trace`, `config`, `schedule_rules`.
Begin reading at `step_costs.py`, `profile.py`, `action_costs.py`, `virtual_relay.py`.
"""

from l2l_core.simulator.cluster import BlockShards as BlockShards
from l2l_core.simulator.cluster import Cluster as Cluster
from l2l_core.simulator.cost_formula import FormulaLayer as FormulaLayer
from l2l_core.simulator.cost_formula import Machine as Machine
from l2l_core.simulator.cost_formula import Shapes as Shapes
from l2l_core.simulator.cost_formula import profile_fields as profile_fields
from l2l_core.simulator.cost_formula import transfer_cost as transfer_cost
from l2l_core.simulator.profile import Profile as Profile
from l2l_core.simulator.profile_builder import ProfileBuilder as ProfileBuilder
from l2l_core.simulator.simulation import MAX_EVENTS as MAX_EVENTS
from l2l_core.simulator.simulation import simulate as simulate
from l2l_core.simulator.simulation import simulate_step as simulate_step
from l2l_core.simulator.step_costs import BEFORE_FIRST_STAY as BEFORE_FIRST_STAY
from l2l_core.simulator.step_costs import COPY_LANES as COPY_LANES
from l2l_core.simulator.step_costs import SHELL as SHELL
from l2l_core.simulator.step_costs import ComputeOp as ComputeOp
from l2l_core.simulator.step_costs import EPSJob as EPSJob
from l2l_core.simulator.step_costs import GradientPartCost as GradientPartCost
from l2l_core.simulator.step_costs import LayerCost as LayerCost
from l2l_core.simulator.step_costs import MemorySamples as MemorySamples
from l2l_core.simulator.step_costs import StashMoves as StashMoves
from l2l_core.simulator.step_costs import StayCost as StayCost
from l2l_core.simulator.step_costs import TurnCost as TurnCost
from l2l_core.simulator.virtual_shelf import BlockFileSize as BlockFileSize
from l2l_core.simulator.virtual_shelf import VirtualDiskBackend as VirtualDiskBackend
from l2l_core.simulator.virtual_workers import TrafficTotal as TrafficTotal
