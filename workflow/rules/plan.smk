# Define `plan`, which is made from the validated configuration, and `job`, which has the input functions of the rules.
from snakemake.logging import logger

from implicit_llm_workflow.project_dirs import require_known_variables, require_own_package
from implicit_llm_workflow.rules.before_snakemake import errors_in_one_line
from implicit_llm_workflow.rules.snakemake_driver import Driver, announce
from implicit_llm_workflow.rules.snakemake_rules import RuleInputs, plan_from_snakemake, the_config_file

with errors_in_one_line(logger.error):
    require_own_package(Path(workflow.basedir))
    plan = plan_from_snakemake(config, workflow.configfiles)
    if workflow.is_main_process:
        require_known_variables()
        driver = Driver(workflow, plan, logger)
        announce()

job = RuleInputs(plan, ancient, is_driver=workflow.is_main_process)


wildcard_constraints:
    **job.wildcard_constraints,


onstart:
    if workflow.is_main_process:
        driver.before_first_job()


onsuccess:
    if workflow.is_main_process:
        driver.after_last_job()


onerror:
    if workflow.is_main_process:
        driver.after_last_job()
