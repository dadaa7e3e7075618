"""The names of the package with their types; `__init__.py` imports each when it is first used."""

from meshwright.api.planning import changed_plan as changed_plan
from meshwright.api.planning import derive as derive
from meshwright.api.planning import make_setting as make_setting
from meshwright.api.proving import ProofOptions as ProofOptions
from meshwright.api.proving import prove_service as prove_service
from meshwright.api.proving import prove_strategy as prove_strategy
from meshwright.api.running import TextOptions as TextOptions
from meshwright.api.running import generate_text as generate_text
from meshwright.api.running import run_training as run_training
from meshwright.cost.setting import Setting as Setting
from meshwright.cost.train_step import price_strategy as price_strategy
from meshwright.masks.table import block_table as block_table
from meshwright.nn.attention.flex import flex_attention as flex_attention
from meshwright.parallel.generation.packed_step import PackedStep as PackedStep
from meshwright.parallel.train_step import TrainStep as TrainStep
from meshwright.plan.plan_file import Plan as Plan
from meshwright.plan.plan_file import ServicePlan as ServicePlan
from meshwright.plan.plan_file import load_plan as load_plan
from meshwright.plan.plan_file import save_plan as save_plan
from meshwright.plan.planner import rank_plans as rank_plans
from meshwright.plan.serving.planner import plan_service as plan_service
from meshwright.plan.serving.service import Service as Service
from meshwright.plan.why.explain import explain as explain
from meshwright.plan.why.explain_service import explain_service as explain_service
from meshwright.serve.engine import Engine as Engine
from meshwright.serve.offline.slots import SlotEngine as SlotEngine
from meshwright.serve.opening import open_engine as open_engine
from meshwright.serve.options import EngineOptions as EngineOptions
from meshwright.serve.request import TokenRequest as TokenRequest
from meshwright.spec.calibration import load_calibration as load_calibration
from meshwright.spec.catalogue import load_model as load_model
from meshwright.spec.cluster import parse_cluster as parse_cluster
from meshwright.spec.job import Job as Job
from meshwright.spec.model import Model as Model
from meshwright.spec.strategy import Strategy as Strategy
from meshwright.spec.strategy import make_mesh as make_mesh

__version__: str
