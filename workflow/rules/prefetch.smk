localrules:
    prefetch,


rule prefetch:
    """Fetch what the jobs need from the network, where there is one; the jobs themselves then need none."""
    log:
        f"results/{plan.experiment.name}/prefetch.log",
    params:
        config=lambda wildcards: the_config_file(plan, workflow.configfiles),
    shell:
        "implicit-llm prefetch {params.config:q} | tee -a {log:q}"
