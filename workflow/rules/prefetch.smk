localrules:
    prefetch,


rule prefetch:
    """Fetch the files that the jobs need, on a machine with a network; the jobs themselves then need no network."""
    log:
        f"results/{plan.experiment.name}/prefetch.log",
    params:
        config=lambda wildcards: the_config_file(plan, workflow.configfiles),
    shell:
        "implicit-llm prefetch {params.config:q} | tee -a {log:q}"
