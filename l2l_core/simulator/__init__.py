"""A step on a virtual clock: costs recorded from a trace or computed from shapes, replayed by the relay's schedule.

May import `shelf`, `workers`, `eps.blocks`, `devices`, `trace`, `rules`, `config`.
Begin reading at `costs.py`, `profile.py`, `replay.py`.
"""

from l2l_core.simulator.costs import COPY_LANES as COPY_LANES
from l2l_core.simulator.costs import SHELL as SHELL
from l2l_core.simulator.costs import START as START
from l2l_core.simulator.costs import Job as Job
from l2l_core.simulator.costs import LayerCost as LayerCost
from l2l_core.simulator.costs import Memory as Memory
from l2l_core.simulator.costs import Moves as Moves
from l2l_core.simulator.costs import Op as Op
from l2l_core.simulator.costs import PartCost as PartCost
from l2l_core.simulator.costs import Stay as Stay
from l2l_core.simulator.costs import TurnCost as TurnCost
from l2l_core.simulator.fleet import Fleet as Fleet
from l2l_core.simulator.fleet import Share as Share
from l2l_core.simulator.formula import Machine as Machine
from l2l_core.simulator.formula import Shapes as Shapes
from l2l_core.simulator.formula import Sized as Sized
from l2l_core.simulator.formula import cost_of_moving as cost_of_moving
from l2l_core.simulator.formula import costs_by_formula as costs_by_formula
from l2l_core.simulator.profile import Profile as Profile
from l2l_core.simulator.recording import Recording as Recording
from l2l_core.simulator.simulate import MOST_EVENTS as MOST_EVENTS
from l2l_core.simulator.simulate import replayed as replayed
from l2l_core.simulator.simulate import simulate as simulate
from l2l_core.simulator.virtual_crew import Sent as Sent
from l2l_core.simulator.virtual_shelf import Filed as Filed
from l2l_core.simulator.virtual_shelf import OnShelf as OnShelf
