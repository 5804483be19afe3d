"""Replace the layers of an ordinary model; it stays an ordinary model.

May import `model`.
Begin reading at `layer_replacement.py`.
"""

from l2l_core.surgery.code_between_layers import CodeBetweenLayers as CodeBetweenLayers
from l2l_core.surgery.code_between_layers import EqualOutputs as EqualOutputs
from l2l_core.surgery.code_between_layers import copy_outputs as copy_outputs
from l2l_core.surgery.code_between_layers import different_arguments as different_arguments
from l2l_core.surgery.code_between_layers import ignored_hook_results as ignored_hook_results
from l2l_core.surgery.code_between_layers import outputs_are_alike as outputs_are_alike
from l2l_core.surgery.code_between_layers import results_are_close as results_are_close
from l2l_core.surgery.config_update import lists_that_follow as lists_that_follow
from l2l_core.surgery.depth_reads import DepthRead as DepthRead
from l2l_core.surgery.depth_reads import DepthWatch as DepthWatch
from l2l_core.surgery.layer_features import describe_layer as describe_layer
from l2l_core.surgery.layer_features import layer_fingerprint as layer_fingerprint
from l2l_core.surgery.layer_features import ties_of as ties_of
from l2l_core.surgery.layer_replacement import replace_layers as replace_layers
from l2l_core.surgery.layer_replacement import substitute_modules as substitute_modules
from l2l_core.surgery.loop_numbers import RecordedCalls as RecordedCalls
from l2l_core.surgery.loop_numbers import depth_numbers as depth_numbers
from l2l_core.surgery.loop_numbers import find_loop_numbers as find_loop_numbers
from l2l_core.surgery.loop_numbers import loop_numbers_among as loop_numbers_among
from l2l_core.surgery.loop_numbers import numbers_around as numbers_around
from l2l_core.surgery.loop_numbers import record_calls as record_calls
from l2l_core.surgery.loop_numbers import set_numbers as set_numbers
from l2l_core.surgery.stack_context import possible_depth_reads as possible_depth_reads
from l2l_core.surgery.trial_runs import CallSample as CallSample
from l2l_core.surgery.trial_runs import capture_samples as capture_samples
from l2l_core.surgery.trial_runs import check_fit as check_fit
