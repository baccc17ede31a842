rule import_checkpoint:
    """Import a model that was trained elsewhere; the conversion has two copies of the weights in memory."""
    output:
        manifest="results/{config}/checkpoint/{peer}/work/{fingerprint}/manifest.json",
    log:
        "results/{config}/checkpoint/{peer}/work/{fingerprint}/job.log",
    benchmark:
        "results/{config}/checkpoint/{peer}/work/{fingerprint}/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=32000,
        runtime=60,
    shell:
        "implicit-llm job --run-dir results/{wildcards.config:q}/checkpoint/{wildcards.peer:q}"
        " --identity @results/{wildcards.config:q}/.jobs/checkpoint/{wildcards.peer:q}/{wildcards.fingerprint:q}.json"
        " --log {log:q}"
