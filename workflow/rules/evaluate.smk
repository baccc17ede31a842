rule evaluate_word_problem:
    input:
        model_and_data=job.upstream("evaluate"),
        preflight=job.preflight("evaluate", workflow),
    output:
        manifest="results/{config}/evaluate/{run}/{phase}/{evaluation}/manifest.json",
    log:
        "results/{config}/evaluate/{run}/{phase}/{evaluation}/job.log",
    benchmark:
        "results/{config}/evaluate/{run}/{phase}/{evaluation}/benchmark.tsv"
    wildcard_constraints:
        evaluation=job.names("evaluate", "word_problem"),
    conda:
        job.conda_env("evaluate", workflow)
    threads: 4
    resources:
        mem_mb=16000,
        runtime=240,
        device="auto",
        batch_size=0,
    params:
        identity=job.identity("evaluate"),
        inputs=job.inputs("evaluate"),
        kind=job.kind("evaluate"),
    shell:
        "implicit-llm evaluate {params.kind:q}"
        " --run-dir results/{wildcards.config:q}/evaluate/{wildcards.run:q}/{wildcards.phase:q}/{wildcards.evaluation:q}"
        " --identity {params.identity:q} {params.inputs:q} --log {log:q}"
        " --threads {threads} --device {resources.device:q} --batch-size {resources.batch_size:q}"


# Accuracy on the questions of windows of the training length: the smallest of the evaluations.
use rule evaluate_word_problem as evaluate_catbabi with:
    wildcard_constraints:
        evaluation=job.names("evaluate", "catbabi"),


# Reads long sequences with a large vocabulary: a model and its logits fill a card.
use rule evaluate_word_problem as evaluate_perplexity with:
    wildcard_constraints:
        evaluation=job.names("evaluate", "perplexity"),
    resources:
        mem_mb=64000,
        runtime=720,
        device="auto",
        batch_size=0,


# Every token in every mode, one of which goes token by token; the logits of two modes lie side by side.
use rule evaluate_perplexity as evaluate_duality with:
    wildcard_constraints:
        evaluation=job.names("evaluate", "duality"),


# Derivatives in fp64 at a few tokens: minutes on a CPU for a published word-problem model.
use rule evaluate_word_problem as evaluate_jacobian with:
    wildcard_constraints:
        evaluation=job.names("evaluate", "jacobian"),


# Tens of thousands of short requests; the logits of a whole batch and their softmax lie side by side.
use rule evaluate_word_problem as evaluate_lm_eval with:
    wildcard_constraints:
        evaluation=job.names("evaluate", "lm_eval"),
    resources:
        mem_mb=64000,
        runtime=720,
        device="auto",
        batch_size=0,
