# The validated configuration and what follows from it for the rules: `plan` and `job`.
from snakemake.logging import logger

from implicit_llm_workflow.project_dirs import require_own_package
from implicit_llm_workflow.rules.invocation import announce
from implicit_llm_workflow.rules.snakemake_driver import (
    errors_in_one_line,
    force_stale,
    make_mlflow_store,
    request_again,
)
from implicit_llm_workflow.rules.snakemake_rules import RuleInputs, plan_from_snakemake, the_config_file

with errors_in_one_line(logger):
    require_own_package(Path(workflow.basedir))
    plan = plan_from_snakemake(config, workflow.configfiles)
    force_stale(workflow, plan, logger)

if workflow.is_main_process:
    announce()

job = RuleInputs(plan, ancient)


wildcard_constraints:
    **job.wildcard_constraints,


onstart:
    request_again(workflow, plan)
    make_mlflow_store(workflow, plan, logger)
