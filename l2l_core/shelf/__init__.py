"""Weights and optimizer state in files, for models that do not fit in memory.

May import `workers`, `saves`, `eps`, `eps.optimizers`, `eps.blocks`, `surgery`, `devices`, `model`, `trace`, `config`.
Begin reading at `record_store.py` (why a crash loses nothing) and `disk_step.py`; `disk_backend.py` connects them with the EPS.
"""

from l2l_core.shelf.buffer_rotation import READ_AHEAD as READ_AHEAD
from l2l_core.shelf.buffer_rotation import BufferRotation as BufferRotation
from l2l_core.shelf.buffer_rotation import ExtentRead as ExtentRead
from l2l_core.shelf.buffer_rotation import FileExtent as FileExtent
from l2l_core.shelf.buffer_rotation import StashBuffer as StashBuffer
from l2l_core.shelf.direct_io import PAGE as PAGE
from l2l_core.shelf.direct_io import round_to_pages as round_to_pages
from l2l_core.shelf.disk_backend import DiskBackend as DiskBackend
from l2l_core.shelf.disk_backend import make_disk_backend as make_disk_backend
from l2l_core.shelf.file_shelf import Disk as Disk
from l2l_core.shelf.file_shelf import FileShelf as FileShelf
from l2l_core.shelf.initial_weights import empty_weights as empty_weights
from l2l_core.shelf.initial_weights import refuse_edited_save as refuse_edited_save
from l2l_core.shelf.initial_weights import safetensors_files as safetensors_files
from l2l_core.shelf.memory_sizes import BlockSize as BlockSize
from l2l_core.shelf.memory_sizes import MemorySizes as MemorySizes
from l2l_core.shelf.memory_sizes import StateSizeTrial as StateSizeTrial
from l2l_core.shelf.memory_sizes import check_in_core_fits as check_in_core_fits
