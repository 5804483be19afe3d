"""What goes over the link during a step: weights, gradients, images; and what that costs.

May import `step.graph`, `eps`, `devices`, `model`, `trace`.
Begin reading at `lanes.py`, `slots.py`, `stash.py`.
"""

from l2l_core.step.traffic.at_work import NOBODY as NOBODY
from l2l_core.step.traffic.at_work import AtWork as AtWork
from l2l_core.step.traffic.clock import Clock as Clock
from l2l_core.step.traffic.gradient import Gradient as Gradient
from l2l_core.step.traffic.gradient import GradientSlots as GradientSlots
from l2l_core.step.traffic.gradient import Ways as Ways
from l2l_core.step.traffic.images import Images as Images
from l2l_core.step.traffic.lanes import Lane as Lane
from l2l_core.step.traffic.lanes import Link as Link
from l2l_core.step.traffic.meter import Meter as Meter
from l2l_core.step.traffic.meter import Metered as Metered
from l2l_core.step.traffic.meter import NewHabit as NewHabit
from l2l_core.step.traffic.meter import timed as timed
from l2l_core.step.traffic.readers import before_reads as before_reads
from l2l_core.step.traffic.slots import Prefetch as Prefetch
from l2l_core.step.traffic.slots import Stay as Stay
from l2l_core.step.traffic.stash import Stash as Stash
from l2l_core.step.traffic.takers import Takers as Takers
from l2l_core.step.traffic.watch import Watch as Watch
