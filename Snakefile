from snakemake.utils import min_version

min_version("9.11")

# Snakemake merges config files, so the default must not lie below another one.
if not workflow.configfiles:

    configfile: "workflow/config/demo.yaml"


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
        plan.manifests("report"),


rule data:
    input:
        plan.manifests("data"),


rule train:
    input:
        plan.manifests("train"),


rule evaluate:
    input:
        plan.manifests("evaluate"),
