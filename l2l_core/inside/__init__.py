"""What is seen inside of a model while its layers pass by: activations, attention, and what the head makes of each depth.

May import `step.micro_batch`, `eps.blocks`, `batches`, `model`.
Begin reading at `values.py`, `looking.py`, `observer.py`.
"""

from l2l_core.inside.asked import Asked as Asked
from l2l_core.inside.asked import check_numbers as check_numbers
from l2l_core.inside.asked import spaced as spaced
from l2l_core.inside.looking import Passes as Passes
from l2l_core.inside.looking import look as look
from l2l_core.inside.observer import Observer as Observer
from l2l_core.inside.rows import Rows as Rows
from l2l_core.inside.values import BINS as BINS
from l2l_core.inside.values import Depth as Depth
from l2l_core.inside.values import Inside as Inside
from l2l_core.inside.values import Passing as Passing
from l2l_core.inside.values import Spread as Spread
from l2l_core.inside.values import Written as Written
