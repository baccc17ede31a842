# For profiles that give rules a hardware class (resource `hardware`). It changes no result: nothing depends on it but by
# `ancient`.
rule preflight:
    """Look, in seconds, whether a class of machines can do its jobs, before its first long job."""
    output:
        report="results/{config}/.preflight/{hardware}.json",
    log:
        "results/{config}/.preflight/{hardware}.log",
    threads: 1
    resources:
        mem_mb=8000,
        runtime=15,
        device="auto",
        kernels="auto",
    params:
        checkpoint_bytes=job.largest_checkpoint_bytes(),
    shell:
        "implicit-llm preflight --hardware {wildcards.hardware:q} --results results/{wildcards.config:q}"
        " --device {resources.device:q} --kernels {resources.kernels:q} --checkpoint-bytes {params.checkpoint_bytes:q}"
        " --report {output.report:q} > {log:q} 2>&1"
