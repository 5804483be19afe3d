"""Strategies: other ways to train in less memory, as plans on one executor, with exact bytes before and after.

May import `relay`, `pipelines`, `simulator`, `step`, `step.traffic`, `step.graph`, `eps`, `eps.optimizers`, `eps.blocks`,
`devices`, `batches`, `model`, `trace`, `schedule_rules`, `config`.
Begin reading at `plan.py`, `plan_execution.py`, `plan_memory.py`; `lab.py` is the facade.
"""

from l2l_core.strategies.activation_map import activation_bytes as activation_bytes
from l2l_core.strategies.activation_map import activation_map as activation_map
from l2l_core.strategies.allocation_meter import AllocationMeter as AllocationMeter
from l2l_core.strategies.few_bits import FewBit as FewBit
from l2l_core.strategies.few_bits import few_bit as few_bit
from l2l_core.strategies.fixed_plans import mixed_plan as mixed_plan
from l2l_core.strategies.lab import Lab as Lab
from l2l_core.strategies.lab import LabResult as LabResult
from l2l_core.strategies.measurement import measure_losses as measure_losses
from l2l_core.strategies.pipeline_treatments import StageTreatment as StageTreatment
from l2l_core.strategies.pipeline_treatments import TreatedPipeline as TreatedPipeline
from l2l_core.strategies.pipeline_treatments import stage_chain as stage_chain
from l2l_core.strategies.pipeline_treatments import treat_pipeline as treat_pipeline
from l2l_core.strategies.plan import Operation as Operation
from l2l_core.strategies.plan import Operations as Operations
from l2l_core.strategies.plan import Plan as Plan
from l2l_core.strategies.plan import check_operations as check_operations
from l2l_core.strategies.plan_execution import PlanExecution as PlanExecution
from l2l_core.strategies.plan_runner import restore_buffers as restore_buffers
from l2l_core.strategies.plan_verification import PlanVerification as PlanVerification
from l2l_core.strategies.policies import Combined as Combined
from l2l_core.strategies.policies import Full as Full
from l2l_core.strategies.policies import Karma as Karma
from l2l_core.strategies.policies import Offload as Offload
from l2l_core.strategies.policies import PartitionSwap as PartitionSwap
from l2l_core.strategies.policies import Periodic as Periodic
from l2l_core.strategies.policies import Plain as Plain
from l2l_core.strategies.policies import Policy as Policy
from l2l_core.strategies.policies import RelayPolicy as RelayPolicy
from l2l_core.strategies.policies import Rotor as Rotor
from l2l_core.strategies.randomized_linear import RandomizedLinear as RandomizedLinear
from l2l_core.strategies.randomized_linear import randomized_linear as randomized_linear
from l2l_core.strategies.selective_checkpoint import SelectiveCheckpoint as SelectiveCheckpoint
from l2l_core.strategies.stage_structure import StageStructure as StageStructure
from l2l_core.strategies.staged_forward import StagedForward as StagedForward
from l2l_core.strategies.storage_offload import StorageOffloader as StorageOffloader
from l2l_core.strategies.strategy_table import Strategy as Strategy
from l2l_core.strategies.strategy_table import StrategyResult as StrategyResult
from l2l_core.strategies.strategy_table import StrategyTable as StrategyTable
from l2l_core.strategies.structure_tracer import StructureTracer as StructureTracer
