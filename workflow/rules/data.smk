# Every kind of data but those below: one thread and little memory are enough.
rule data_set:
    input:
        upstream=job.upstream("data"),
    output:
        manifest="results/{config}/data/{data}/manifest.json",
    log:
        "results/{config}/data/{data}/job.log",
    benchmark:
        "results/{config}/data/{data}/benchmark.tsv"
    wildcard_constraints:
        data=job.names_but("data", "tokenizer", "token_shard", "token_stream"),
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
    params:
        identity=job.identity("data"),
        inputs=job.inputs("data"),
    shell:
        "implicit-llm data --run-dir results/{wildcards.config:q}/data/{wildcards.data:q}"
        " --identity {params.identity:q} {params.inputs:q} --log {log:q} --threads {threads}"


# Training one counts pairs of tokens over the corpus, on all cores.
use rule data_set as tokenizer with:
    wildcard_constraints:
        data=job.names("data", "tokenizer"),
    threads: 8
    resources:
        mem_mb=8000,
        runtime=120,


# Remembered pieces of text leave little to encode: several shards at once use a machine better than one on all cores.
use rule data_set as token_shard with:
    wildcard_constraints:
        data=job.names("data", "token_shard"),
    threads: 2
    resources:
        mem_mb=16000,
        runtime=720,


# An index of the shards' files, or a copy of the small test split.
use rule data_set as token_stream with:
    wildcard_constraints:
        data=job.names("data", "token_stream"),
    resources:
        mem_mb=4000,
        runtime=240,
