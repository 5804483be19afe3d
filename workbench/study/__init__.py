"""Studies: variants with several seeds, trained, resumed, compared and drawn; widgets are in `study_view.py` alone.

May import `panels`, `pictures`, `session`.
Begin reading at `study.py`, `segment.py`, `recorded_study.py`.
"""

from workbench.study.recorded_study import RecordedStudy as RecordedStudy
from workbench.study.study import Study as Study
from workbench.study.study_table import StudyTable as StudyTable
from workbench.study.variants import Variant as Variant
from workbench.study.variants import grid as grid
