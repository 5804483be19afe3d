"""Arrays and figures computed from a trace; no drawing, no widgets.

May import the engine.
Begin reading at `trace_columns.py`, `lane_usage.py`, `state_timeline.py`.
"""

from workbench.readings.algorithm_text import algorithm_lines as algorithm_lines
from workbench.readings.algorithm_text import line_text as line_text
from workbench.readings.bars import Bars as Bars
from workbench.readings.bars import make_bars as make_bars
from workbench.readings.bars import make_hatched as make_hatched
from workbench.readings.lane_usage import LayerUsage as LayerUsage
from workbench.readings.lane_usage import TimelineSummary as TimelineSummary
from workbench.readings.lane_usage import find_phases as find_phases
from workbench.readings.lane_usage import has_kind as has_kind
from workbench.readings.lane_usage import layer_usage as layer_usage
from workbench.readings.lane_usage import summarize_timeline as summarize_timeline
from workbench.readings.lane_usage import visit_starts as visit_starts
from workbench.readings.layer_names import LayerNumbers as LayerNumbers
from workbench.readings.layer_names import full_name as full_name
from workbench.readings.layer_names import number_layers as number_layers
from workbench.readings.layer_names import short_name as short_name
from workbench.readings.memory_estimate import BF16_FACTOR as BF16_FACTOR
from workbench.readings.memory_estimate import batch_bytes as batch_bytes
from workbench.readings.memory_estimate import estimate_in_core_bytes as estimate_in_core_bytes
from workbench.readings.memory_levels import MemoryLevels as MemoryLevels
from workbench.readings.memory_levels import Peak as Peak
from workbench.readings.memory_levels import find_peak as find_peak
from workbench.readings.si_prefix import format_prefixed as format_prefixed
from workbench.readings.state_timeline import StateTimeline as StateTimeline
from workbench.readings.step_state import SlotState as SlotState
from workbench.readings.step_state import StepState as StepState
from workbench.readings.trace_columns import Columns as Columns
