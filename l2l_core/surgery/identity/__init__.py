"""Find parameter values that make a new layer the identity, by trying them.

May import `surgery`, `model`.
Begin reading at `identity.py`.
"""

from l2l_core.surgery import CallSample as CallSample
from l2l_core.surgery import capture_samples as capture_samples
from l2l_core.surgery.identity.identity import hidden_argument as hidden_argument
from l2l_core.surgery.identity.identity import plan_identity as plan_identity
from l2l_core.surgery.identity.identity import sample_after as sample_after
from l2l_core.surgery.identity.search import IdentityPlan as IdentityPlan
