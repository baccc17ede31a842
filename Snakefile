import sys
from pathlib import Path

from snakemake.utils import min_version

from implicit_llm_workflow.commands.command_targets import config_file_of

min_version("9.12")

# Snakemake merges config files, so the chosen one must not lie below another one. Jobs on other machines are told the same.
if not workflow.configfiles:
    chosen = config_file_of(sys.argv[1:])

    configfile: chosen

    workflow.overwrite_configfiles.append(Path(chosen).absolute())


include: "workflow/rules/plan.smk"
include: "workflow/rules/tracking.smk"
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
    default_target: True
    input:
        plan.wanted_manifests,


rule data:
    input:
        plan.manifests("data"),


rule train:
    input:
        plan.manifests("train"),


rule evaluate:
    input:
        plan.manifests("evaluate"),


# `snakemake paper`: everything, of the experiment of this name.
rule:
    name:
        plan.experiment.name
    input:
        plan.wanted_manifests,


# `snakemake figure_1_right`: one figure or table of the paper; `implicit-llm excerpts` lists them.
for excerpt in plan.experiment.excerpts:

    rule:
        name:
            excerpt
        input:
            plan.manifest(plan.find(excerpt)),
