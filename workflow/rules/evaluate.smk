rule evaluate_word_problem:
    input:
        model_and_data=job.upstream("evaluate"),
        tracking=ancient(rules.mlflow_init.output.ready),
    output:
        manifest="results/{config}/evaluate/{run}/{evaluation}/manifest.json",
    log:
        "results/{config}/evaluate/{run}/{evaluation}/job.log",
    benchmark:
        "results/{config}/evaluate/{run}/{evaluation}/benchmark.tsv"
    threads: 4
    resources:
        mem_mb=16000,
        runtime=240,
        device="auto",
    params:
        identity=job.identity("evaluate"),
        inputs=job.inputs("evaluate"),
    shell:
        "implicit-llm evaluate --run-dir results/{wildcards.config}/evaluate/{wildcards.run}/{wildcards.evaluation}"
        " --identity {params.identity:q} {params.inputs:q} --log {log:q}"
        " --threads {threads} --device {resources.device}"
