"""Guards: each refuses, or makes exact, one class of programs that a layer's recompute would train differently.

May import `step.traffic`, `step.graph`, `eps.blocks`, `devices`, `model`. Begin reading at `layer_reads.py`, then `run_first` in
`step/micro_batch/layer_call.py`, which calls them.

file                  class of failure                                                     tests in tests/core/step
layer_reads.py        arguments changed in place; tensors that a layer reads and is not    test_in_place.py,
                      given, from attributes, closures or other layers                     test_layer_reads.py
module_hooks.py       side outputs: outputs of submodules that the model reads elsewhere   test_hooks.py
module_attributes.py  attributes that carry values from one call to another                test_attributes.py
attribute_tracer.py   reads and writes of these attributes, by descriptors on classes      test_attributes.py
state_diff.py         counters, running means and random draws in a layer                  test_module_state.py
empty_cache.py        caches of keys and values that a layer fills                         test_call.py
kept_weights.py       attributes in the memory of weights, which the relay moves            test_kept_weights.py
recompute_check.py    recomputes with other outputs than the first run                     test_recomputes.py

In a step of 24 calls of a GPT-2 block 64 wide (AMD EPYC, one thread), a call takes 4.5 ms, of which versions of arguments 10 us,
the walk of its graph for foreign reads 81 us, checksums 30 us, side outputs 3 us.
"""

from l2l_core.step.guards.empty_cache import CacheView as CacheView
from l2l_core.step.guards.empty_cache import EmptyCache as EmptyCache
from l2l_core.step.guards.kept_weights import refuse_kept_weights as refuse_kept_weights
from l2l_core.step.guards.kept_weights import warn_of_tensors_in_left_memory as warn_of_tensors_in_left_memory
from l2l_core.step.guards.layer_reads import ArgumentVersions as ArgumentVersions
from l2l_core.step.guards.layer_reads import find_layer_graph as find_layer_graph
from l2l_core.step.guards.module_attributes import AttributeKey as AttributeKey
from l2l_core.step.guards.module_attributes import ModuleAttributes as ModuleAttributes
from l2l_core.step.guards.module_attributes import attribute_dict as attribute_dict
from l2l_core.step.guards.module_hooks import InstancePatch as InstancePatch
from l2l_core.step.guards.module_hooks import Locator as Locator
from l2l_core.step.guards.module_hooks import SideOutputs as SideOutputs
from l2l_core.step.guards.module_hooks import UserHooks as UserHooks
from l2l_core.step.guards.module_hooks import alive_outputs as alive_outputs
from l2l_core.step.guards.module_hooks import temporarily as temporarily
from l2l_core.step.guards.recompute_check import Checksum as Checksum
from l2l_core.step.guards.recompute_check import RecomputeCheck as RecomputeCheck
from l2l_core.step.guards.recompute_check import checksums_of as checksums_of
from l2l_core.step.guards.recompute_check import difference_message as difference_message
from l2l_core.step.guards.state_diff import LayerState as LayerState
from l2l_core.step.guards.state_diff import NumpyDrawOrder as NumpyDrawOrder
from l2l_core.step.guards.state_diff import StateDiff as StateDiff
from l2l_core.step.guards.state_diff import StateDiffs as StateDiffs
from l2l_core.step.guards.state_diff import preserved_attributes as preserved_attributes
