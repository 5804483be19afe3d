"""Other layers into an ordinary model, which stays one; no EPS, no device, no relay.

May import `model`, `batches`.
Begin reading at `layer_replacement.py`.
"""

from l2l_core.surgery.fit_check import check_fit as check_fit
from l2l_core.surgery.layer_features import describe_layer as describe_layer
from l2l_core.surgery.layer_features import layer_fingerprint as layer_fingerprint
from l2l_core.surgery.layer_replacement import replace_layers as replace_layers
from l2l_core.surgery.sample import CallSample as CallSample
from l2l_core.surgery.sample import capture_samples as capture_samples
from l2l_core.surgery.sample import preserve_random_state as preserve_random_state
from l2l_core.surgery.ties import ties_of as ties_of
