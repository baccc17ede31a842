rule word_problem_data:
    input:
        tracking=ancient(rules.mlflow_init.output.ready),
    output:
        manifest="results/{config}/data/{data}/manifest.json",
    log:
        "results/{config}/data/{data}/job.log",
    benchmark:
        "results/{config}/data/{data}/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        identity=job.identity("data"),
    shell:
        "implicit-llm data --run-dir results/{wildcards.config}/data/{wildcards.data}"
        " --identity {params.identity:q} --log {log:q}"
