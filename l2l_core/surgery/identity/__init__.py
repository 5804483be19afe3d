"""What makes a new layer the identity, found by trying.

May import `surgery`, `model`, `batches`.
Begin reading at `identity.py`.
"""

from l2l_core.surgery.identity.identity import CallSample as CallSample
from l2l_core.surgery.identity.identity import IdentityPlan as IdentityPlan
from l2l_core.surgery.identity.identity import apply_plan as apply_plan
from l2l_core.surgery.identity.identity import capture_samples as capture_samples
from l2l_core.surgery.identity.identity import plan_identity as plan_identity
from l2l_core.surgery.identity.identity import sample_after as sample_after
