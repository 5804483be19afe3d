"""Ranks that train in processes of their own, steered and seen from one place; no widgets.

May import `session`.
Begin reading at `rank_controller.py` (what can be done), then `rank_processes.py` (this side of the processes) and `rank_server.py` (the other one).
"""

from workbench.ranks.rank_controller import RankController as RankController
from workbench.ranks.rank_processes import LaunchError as LaunchError
from workbench.ranks.rank_processes import RankProcesses as RankProcesses
from workbench.ranks.remote_rank import RemoteRank as RemoteRank
