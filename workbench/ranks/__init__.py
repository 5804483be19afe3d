"""Ranks that train in processes of their own, steered and seen from one place; no widgets.

May import `session`.
Begin reading at `conductor.py` (what can be done), then `ranks.py` (this side of the processes) and `rank.py` (the other one).
"""

from workbench.ranks.conductor import Conductor as Conductor
from workbench.ranks.ranks import LaunchError as LaunchError
from workbench.ranks.ranks import Ranks as Ranks
from workbench.ranks.remote import Remote as Remote
