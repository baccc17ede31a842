# Profiles that give rules a hardware class (resource `hardware`) use this rule. It changes no result: its report is an
# `ancient` input.
rule preflight:
    """Check in seconds, before the first long job of a hardware class, whether machines of this class can run its jobs."""
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
        checkpoint_bytes=lambda wildcards: job.largest_checkpoint_bytes(),
    shell:
        "implicit-llm preflight --hardware {wildcards.hardware:q} --results results/{wildcards.config:q}"
        " --device {resources.device:q} --kernels {resources.kernels:q} --checkpoint-bytes {params.checkpoint_bytes:q}"
        " --report {output.report:q} > {log:q} 2>&1"
