# The validated configuration and what follows from it for the rules: `plan` and `job`.
import sys

from snakemake.logging import logger

from implicit_llm_workflow.errors import UserError
from implicit_llm_workflow.rules.snakemake_driver import force_stale
from implicit_llm_workflow.rules.snakemake_rules import RuleInputs, plan_from_snakemake, the_config_file

try:
    plan = plan_from_snakemake(config, workflow.configfiles)
    force_stale(workflow, plan, logger)
except UserError as error:
    logger.error(f"error: {error}")
    sys.exit(error.exit_code)

job = RuleInputs(plan, ancient)


wildcard_constraints:
    **job.wildcard_constraints,
