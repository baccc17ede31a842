rule data_set:
    """Make one data set, or the text for one; the rules below make kinds that need more memory, time or threads."""
    input:
        upstream=job.upstream("data"),
    output:
        manifest="results/{config}/data/{data}/work/{fingerprint}/manifest.json",
    log:
        "results/{config}/data/{data}/work/{fingerprint}/job.log",
    benchmark:
        "results/{config}/data/{data}/work/{fingerprint}/benchmark.tsv"
    wildcard_constraints:
        data=job.names("data", "tokenizer", "token_shard", "token_stream", is_others=True),
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
    shell:
        "implicit-llm job --run-dir results/{wildcards.config:q}/data/{wildcards.data:q}"
        " --identity @results/{wildcards.config:q}/.jobs/data/{wildcards.data:q}/{wildcards.fingerprint:q}.json"
        " --log {log:q} --threads {threads}"


use rule data_set as tokenizer with:
    """Copy the tokenizer of a language model, or train one; training counts pairs over the corpus on several cores."""
    wildcard_constraints:
        data=job.names("data", "tokenizer"),
    threads: 8
    resources:
        mem_mb=8000,
        runtime=120,


use rule data_set as token_shard with:
    """Tokenise one share of the corpus (in the paper the deduplicated Pile); several such jobs can run at once."""
    wildcard_constraints:
        data=job.names("data", "token_shard"),
    threads: 2
    resources:
        mem_mb=16000,
        runtime=720,


use rule data_set as token_stream with:
    """Join the shards into a stream of tokens: an index of their files for a whole training split, else a copy."""
    wildcard_constraints:
        data=job.names("data", "token_stream"),
    resources:
        mem_mb=4000,
        runtime=240,
