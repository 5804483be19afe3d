"""Will a model fit? Ways to train it on a card, side by side, and programs that start them.

May import `lessons`, `pictures`.
Begin reading at `fit_request.py` and `fit_table.py`.
"""

from workbench.fit.cards import CARDS as CARDS
from workbench.fit.cards import GpuCard as GpuCard
from workbench.fit.cards import find_card as find_card
from workbench.fit.fit_html import STYLE as STYLE
from workbench.fit.fit_html import card_table as card_table
from workbench.fit.fit_html import fit_html as fit_html
from workbench.fit.fit_html import way_key as way_key
from workbench.fit.fit_request import PRECISIONS as PRECISIONS
from workbench.fit.fit_request import FitRequest as FitRequest
from workbench.fit.fit_request import make_request as make_request
from workbench.fit.fit_table import FitTable as FitTable
from workbench.fit.fit_table import FitWay as FitWay
from workbench.fit.fit_table import Measure as Measure
from workbench.fit.formula_ways import WAYS as WAYS
from workbench.fit.model_source import ALIASES as ALIASES
from workbench.fit.model_source import PRESETS as PRESETS
