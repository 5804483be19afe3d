"""Training with one process per rank, controlled from the parent process; no widgets.

May import `session`.
Begin reading at `rank_controller.py` (commands), then `rank_processes.py` (parent side) and `rank_server.py` (child side).
"""

from workbench.ranks.rank_controller import RankController as RankController
from workbench.ranks.rank_processes import LaunchError as LaunchError
from workbench.ranks.rank_processes import RankProcesses as RankProcesses
from workbench.ranks.remote_rank import RemoteRank as RemoteRank
