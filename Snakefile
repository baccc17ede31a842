from snakemake.utils import min_version

from implicit_llm_workflow.experiment_files.yaml_files import DEFAULT_EXPERIMENT, experiment_path

min_version("9.12")

# Snakemake merges config files, so the default one must not lie below the one that --configfile names.
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
    """Make every result of the experiment, to the report."""
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


# `snakemake paper`: everything, of the experiment of this name.
rule:
    name:
        plan.experiment.name
    input:
        lambda wildcards: plan.target_manifests,


# `snakemake figure_1_right`: one figure or table of the paper; `snakemake --list-target-rules` lists them.
for excerpt in plan.experiment.excerpts:

    rule:
        name:
            excerpt
        input:
            lambda wildcards, name=excerpt: plan.manifest(plan.find(name)),


if workflow.is_main_process:
    # `snakemake results/demo/report/index.html`: the result that the plan wants at a readable path.
    for path, declared in driver.begin().items():

        rule:
            name:
                path
            input:
                declared,

    job.forced = driver.forced
