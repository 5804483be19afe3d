"""Arrays and numbers read off a trace: no drawing, no widgets.

May import the engine.
Begin reading at `columns.py`, `busy.py`, `moments.py`.
"""

from workbench.readings.algorithm import line_words as line_words
from workbench.readings.algorithm import lines_of as lines_of
from workbench.readings.bars import Bars as Bars
from workbench.readings.bars import make_bars as make_bars
from workbench.readings.bars import make_hatched as make_hatched
from workbench.readings.busy import TimelineSummary as TimelineSummary
from workbench.readings.busy import is_kind as is_kind
from workbench.readings.busy import phases_of as phases_of
from workbench.readings.busy import timeline_summary as timeline_summary
from workbench.readings.busy import visits_on as visits_on
from workbench.readings.columns import Columns as Columns
from workbench.readings.in_core_bytes import BF16_FACTOR as BF16_FACTOR
from workbench.readings.in_core_bytes import batch_bytes as batch_bytes
from workbench.readings.in_core_bytes import in_core_bytes as in_core_bytes
from workbench.readings.layer_costs import LayerCost as LayerCost
from workbench.readings.layer_costs import layer_costs as layer_costs
from workbench.readings.layer_names import Numbers as Numbers
from workbench.readings.layer_names import full_name as full_name
from workbench.readings.layer_names import number_layers as number_layers
from workbench.readings.layer_names import short_name as short_name
from workbench.readings.layer_names import span_name as span_name
from workbench.readings.memory_levels import Levels as Levels
from workbench.readings.memory_levels import Peak as Peak
from workbench.readings.memory_levels import find_peak as find_peak
from workbench.readings.moment import Moment as Moment
from workbench.readings.moment import Slot as Slot
from workbench.readings.moments import Moments as Moments
