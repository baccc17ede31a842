rule import_checkpoint:
    """Import a model that was trained elsewhere; converting one holds its weights in memory twice."""
    output:
        manifest="results/{config}/checkpoint/{peer}/manifest.json",
    log:
        "results/{config}/checkpoint/{peer}/job.log",
    benchmark:
        "results/{config}/checkpoint/{peer}/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=32000,
        runtime=60,
    params:
        identity=job.identity("checkpoint"),
    shell:
        "implicit-llm job --run-dir results/{wildcards.config:q}/checkpoint/{wildcards.peer:q}"
        " --identity {params.identity:q} --log {log:q}"
