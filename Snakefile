from snakemake.utils import min_version

from implicit_llm_workflow.experiment_files.yaml_files import DEFAULT_EXPERIMENT, experiment_path

min_version("9.12")

# Snakemake merges config files, so the default experiment is loaded only if --configfile names no other.
if not workflow.configfiles:

    configfile: experiment_path(DEFAULT_EXPERIMENT)


include: "workflow/rules/plan.smk"
include: "workflow/rules/preflight.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/checkpoint.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/prefetch.smk"


localrules:
    all,
    data,
    train,
    evaluate,


rule all:
    """Make every result of the experiment, including the report."""
    default_target: True
    input:
        lambda wildcards: plan.target_manifests,


rule data:
    """Make all data sets."""
    input:
        lambda wildcards: plan.manifests("data"),


rule train:
    """Train all runs, through all phases."""
    input:
        lambda wildcards: plan.manifests("train"),


rule evaluate:
    """Evaluate all trained and imported models."""
    input:
        lambda wildcards: plan.manifests("evaluate"),


# `snakemake paper` makes every result if the experiment is called `paper`.
rule:
    name:
        plan.experiment.name
    input:
        lambda wildcards: plan.target_manifests,


# `snakemake figure_1_right` makes one figure or table of the paper; `snakemake --list-target-rules` lists the names.
for excerpt in plan.experiment.excerpts:

    rule:
        name:
            excerpt
        input:
            lambda wildcards, name=excerpt: plan.manifest(plan.find(name)),


if workflow.is_main_process:
    # `snakemake results/demo/report/index.html` makes the wanted result that is published at this path.
    for path, declared in driver.begin().items():

        rule:
            name:
                path
            input:
                declared,

    job.forced = driver.forced
