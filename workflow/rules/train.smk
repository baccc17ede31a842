rule train_word_problem:
    input:
        data=job.upstream("train", "data"),
        start=job.upstream("train", "start"),
        tracking=ancient(rules.mlflow_init.output.ready),
    output:
        manifest="results/{config}/train/{run}/{phase}/manifest.json",
    log:
        "results/{config}/train/{run}/{phase}/job.log",
    benchmark:
        "results/{config}/train/{run}/{phase}/benchmark.tsv"
    wildcard_constraints:
        run=job.names("train", "word_problem"),
    priority: 1  # the longest chain of jobs starts before the test sets are made
    threads: 4
    resources:
        mem_mb=16000,
        runtime=1440,
        device="auto",
        micro_batch_size=0,
        gradient_checkpointing="off",
    params:
        identity=job.identity("train"),
        inputs=job.inputs("train"),
    shell:
        "implicit-llm train --run-dir results/{wildcards.config}/train/{wildcards.run}/{wildcards.phase}"
        " --identity {params.identity:q} {params.inputs:q} --log {log:q}"
        " --threads {threads} --device {resources.device} --micro-batch-size {resources.micro_batch_size}"
        " --gradient-checkpointing {resources.gradient_checkpointing}"


use rule train_word_problem as train_catbabi with:
    wildcard_constraints:
        run=job.names("train", "catbabi"),


# Where pretraining runs, its batch is divided among GPUs and nodes.
use rule train_word_problem as train_language_model with:
    wildcard_constraints:
        run=job.names("train", "language_model"),
