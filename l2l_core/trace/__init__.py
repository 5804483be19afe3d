"""Recording of a step: events on lanes, memory over time, and files of both. Its analysis is in `analysis`.

Imports nothing of the engine.
Begin reading at `events.py` (what a trace consists of), `trace.py`.
"""

from l2l_core.trace.events import ALL_LANES as ALL_LANES
from l2l_core.trace.events import CATEGORIES as CATEGORIES
from l2l_core.trace.events import DISK as DISK
from l2l_core.trace.events import LANES as LANES
from l2l_core.trace.events import NETWORK as NETWORK
from l2l_core.trace.events import PLACES as PLACES
from l2l_core.trace.events import Event as Event
from l2l_core.trace.events import Failed as Failed
from l2l_core.trace.events import MemorySample as MemorySample
from l2l_core.trace.events import Recorded as Recorded
from l2l_core.trace.events import Worker as Worker
from l2l_core.trace.export import OtherVersionError as OtherVersionError
from l2l_core.trace.export import check_version as check_version
from l2l_core.trace.export import write_chrome as write_chrome
from l2l_core.trace.intervals import Interval as Interval
from l2l_core.trace.intervals import intersect as intersect
from l2l_core.trace.intervals import measure as measure
from l2l_core.trace.intervals import merge as merge
from l2l_core.trace.result import StepResult as StepResult
from l2l_core.trace.trace import Trace as Trace
from l2l_core.trace.visits import last_turn_of as last_turn_of
from l2l_core.trace.visits import turn_of as turn_of
from l2l_core.trace.visits import visits_of as visits_of
from l2l_core.trace.words import format_bytes as format_bytes
from l2l_core.trace.words import time_words as time_words
