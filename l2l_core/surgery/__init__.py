"""Other layers into an ordinary model, which stays one; no EPS, no device, no relay.

May import `model`, `batches`.
Begin reading at `rearrange.py`.
"""

from l2l_core.surgery.likeness import anatomy as anatomy
from l2l_core.surgery.likeness import kind_of as kind_of
from l2l_core.surgery.rearrange import rearrange as rearrange
from l2l_core.surgery.sample import Sample as Sample
from l2l_core.surgery.sample import capture_samples as capture_samples
from l2l_core.surgery.sample import same_random_numbers as same_random_numbers
from l2l_core.surgery.ties import ties_of as ties_of
from l2l_core.surgery.try_fit import check_fit as check_fit
