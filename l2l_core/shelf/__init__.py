"""Weights and optimizer state in files, for models that do not fit in memory.

May import `workers`, `saves`, `eps`, `eps.optimizers`, `eps.blocks`, `surgery`, `devices`, `model`, `trace`, `config`.
Begin reading at `records.py` (why a crash loses nothing), `updates.py`, `place.py`; `on_files.py` puts them at the EPS's seams.
"""

from l2l_core.shelf.direct import PAGE as PAGE
from l2l_core.shelf.direct import pages as pages
from l2l_core.shelf.disk import Disk as Disk
from l2l_core.shelf.empty import empty_weights as empty_weights
from l2l_core.shelf.from_save import FromSave as FromSave
from l2l_core.shelf.from_save import refuse_past as refuse_past
from l2l_core.shelf.on_files import OnFiles as OnFiles
from l2l_core.shelf.on_files import on_files as on_files
from l2l_core.shelf.rotation import READ_AHEAD as READ_AHEAD
from l2l_core.shelf.rotation import Buffer as Buffer
from l2l_core.shelf.rotation import Extent as Extent
from l2l_core.shelf.rotation import Read as Read
from l2l_core.shelf.rotation import Rotation as Rotation
from l2l_core.shelf.rotation import Supply as Supply
from l2l_core.shelf.settings import FileShelf as FileShelf
from l2l_core.shelf.sizes import BlockSize as BlockSize
from l2l_core.shelf.sizes import Sizes as Sizes
from l2l_core.shelf.sizes import StateTrial as StateTrial
from l2l_core.shelf.sizes import check_in_core as check_in_core
