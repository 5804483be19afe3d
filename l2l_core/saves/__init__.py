"""A whole relay as files, and back.

May import `edits`, `eps`, `surgery`, `devices`, `model`.
Begin reading at `folder.py`.
"""

from l2l_core.saves.folder import State as State
from l2l_core.saves.folder import load as load
from l2l_core.saves.folder import save as save
from l2l_core.saves.history import Restorer as Restorer
from l2l_core.saves.history import parts_of as parts_of
from l2l_core.saves.resume import Resumption as Resumption
from l2l_core.saves.resume import keep as keep
from l2l_core.saves.stacks import Edited as Edited
