"""Recording of a step: events on lanes, memory over time, and files of both. `analysis` evaluates it.

Imports nothing of the engine.
Begin reading at `events.py`, then `trace.py`.
"""

from l2l_core.trace.events import ALL_LANES as ALL_LANES
from l2l_core.trace.events import CATEGORIES as CATEGORIES
from l2l_core.trace.events import DISK_LANES as DISK_LANES
from l2l_core.trace.events import LANES as LANES
from l2l_core.trace.events import NETWORK_LANES as NETWORK_LANES
from l2l_core.trace.events import PLACES as PLACES
from l2l_core.trace.events import Event as Event
from l2l_core.trace.events import MemorySample as MemorySample
from l2l_core.trace.events import StepFailure as StepFailure
from l2l_core.trace.events import WorkerInfo as WorkerInfo
from l2l_core.trace.events import find_last_backward_start as find_last_backward_start
from l2l_core.trace.events import group_by_visit as group_by_visit
from l2l_core.trace.events import turn_of as turn_of
from l2l_core.trace.formatting import format_bytes as format_bytes
from l2l_core.trace.formatting import format_seconds as format_seconds
from l2l_core.trace.formatting import parse_bytes as parse_bytes
from l2l_core.trace.intervals import Interval as Interval
from l2l_core.trace.intervals import intersect as intersect
from l2l_core.trace.intervals import merge as merge
from l2l_core.trace.intervals import subtract as subtract
from l2l_core.trace.intervals import total_length as total_length
from l2l_core.trace.trace import StepResult as StepResult
from l2l_core.trace.trace import Trace as Trace
from l2l_core.trace.trace_files import OtherVersionError as OtherVersionError
from l2l_core.trace.trace_files import check_version as check_version
from l2l_core.trace.trace_files import write_chrome as write_chrome
