"""A whole relay as files, and back.

May import `edits`, `eps`, `surgery`, `devices`, `model`.
Begin reading at `state.py`, `manifest.py` (how it is saved), `saved.py` (how it comes back); `folder.py` is the files.
"""

from l2l_core.saves.agreement import check as check
from l2l_core.saves.codec import plain_random as plain_random
from l2l_core.saves.codec import read_random as read_random
from l2l_core.saves.files import sync as sync
from l2l_core.saves.files import write_bytes as write_bytes
from l2l_core.saves.history import Restorer as Restorer
from l2l_core.saves.history import parts_of as parts_of
from l2l_core.saves.history import parts_of_values as parts_of_values
from l2l_core.saves.manifest import save as save
from l2l_core.saves.new_generation import NewGeneration as NewGeneration
from l2l_core.saves.resume import Resumption as Resumption
from l2l_core.saves.resume import keep as keep
from l2l_core.saves.saved import Saved as Saved
from l2l_core.saves.saved import load as load
from l2l_core.saves.saved import load_together as load_together
from l2l_core.saves.stacks import Edited as Edited
from l2l_core.saves.state import State as State
