"""What happened in a step: events on lanes, memory over time, and what is read off them.

May import `rules`.
Begin reading at `events.py` (what a trace consists of), `trace.py`.
"""

from l2l_core.trace.bounds import Bound as Bound
from l2l_core.trace.bounds import micro_batches_to_hide as micro_batches_to_hide
from l2l_core.trace.events import ALL_LANES as ALL_LANES
from l2l_core.trace.events import CATEGORIES as CATEGORIES
from l2l_core.trace.events import DISK as DISK
from l2l_core.trace.events import LANES as LANES
from l2l_core.trace.events import NETWORK as NETWORK
from l2l_core.trace.events import PLACES as PLACES
from l2l_core.trace.events import Event as Event
from l2l_core.trace.events import Failed as Failed
from l2l_core.trace.events import MemorySample as MemorySample
from l2l_core.trace.events import Worker as Worker
from l2l_core.trace.export import OtherVersionError as OtherVersionError
from l2l_core.trace.export import check_version as check_version
from l2l_core.trace.result import StepResult as StepResult
from l2l_core.trace.roofline import ALL_PHASES as ALL_PHASES
from l2l_core.trace.roofline import MIDDLE as MIDDLE
from l2l_core.trace.roofline import OVERLAPPING as OVERLAPPING
from l2l_core.trace.roofline import PHASES as PHASES
from l2l_core.trace.roofline import Roofline as Roofline
from l2l_core.trace.roofline import Work as Work
from l2l_core.trace.roofline import roofline as roofline
from l2l_core.trace.roofline import visits_of as visits_of
from l2l_core.trace.together import Traces as Traces
from l2l_core.trace.trace import Trace as Trace
from l2l_core.trace.waits import BEGIN as BEGIN
from l2l_core.trace.waits import Wait as Wait
from l2l_core.trace.words import format_bytes as format_bytes
