"""Saving and loading of a whole relay.

May import `edits`, `eps`, `eps.optimizers`, `eps.blocks`, `surgery`, `devices`, `model`, `config`.
Begin reading at `relay_state.py` (saving) and `saved_relay.py` (loading); `generations.py` describes the files.
"""

from l2l_core.saves.codec import plain_random as plain_random
from l2l_core.saves.codec import read_random as read_random
from l2l_core.saves.edited_stacks import EditedStacks as EditedStacks
from l2l_core.saves.generation_writer import GenerationWriter as GenerationWriter
from l2l_core.saves.generations import sync as sync
from l2l_core.saves.generations import write_bytes as write_bytes
from l2l_core.saves.history_parts import HistoryRestorer as HistoryRestorer
from l2l_core.saves.history_parts import history_parts as history_parts
from l2l_core.saves.history_parts import snapshot_parts as snapshot_parts
from l2l_core.saves.relay_state import RelayState as RelayState
from l2l_core.saves.relay_state import write_save as write_save
from l2l_core.saves.resumption import Resumption as Resumption
from l2l_core.saves.resumption import register_restore as register_restore
from l2l_core.saves.saved_relay import SavedRelay as SavedRelay
from l2l_core.saves.saved_relay import check_compatible as check_compatible
from l2l_core.saves.saved_relay import describe_differences as describe_differences
from l2l_core.saves.saved_relay import load_save as load_save
