# Each task has its own rule, such as train_word_problem, so that a profile can choose its machines.
for task in plan.experiment.kinds.tasks:

    rule:
        """Train one phase of a run with one seed; a later phase starts from a checkpoint of an earlier one."""
        name:
            f"train_{task}"
        input:
            data_and_start=job.upstream("train"),
            preflight=job.preflight("train", workflow),
        output:
            manifest="results/{config}/train/{run}/{phase}/work/{fingerprint}/manifest.json",
        log:
            "results/{config}/train/{run}/{phase}/work/{fingerprint}/job.log",
        benchmark:
            "results/{config}/train/{run}/{phase}/work/{fingerprint}/benchmark.tsv"
        wildcard_constraints:
            run=job.names("train", task),
        priority: 1  # the longest chain of jobs starts before the test sets are made
        conda:
            job.conda_env("train", workflow)
        threads: 4  # on each node, for all processes of the job there
        resources:
            mem_mb=16000,
            runtime=1440,
            device="auto",
            kernels="auto",
            nodes=1,
            processes_per_node=1,
            micro_batch_size=0,
            gradient_checkpointing="off",
            shard_optimizer="off",
            cuda_graphs="on",
            save_every_s=60,
            grace_s=120,
            hang_s=1800,
        shell:
            "implicit-llm train --run-dir results/{wildcards.config:q}/train/{wildcards.run:q}/{wildcards.phase:q}"
            " --identity @results/{wildcards.config:q}/.jobs/train/{wildcards.run:q}/{wildcards.phase:q}/{wildcards.fingerprint:q}.json"
            " --log {log:q}"
            " --nodes {resources.nodes:q} --processes-per-node {resources.processes_per_node:q} --threads {threads}"
            " --device {resources.device:q} --kernels {resources.kernels:q} --micro-batch-size {resources.micro_batch_size:q}"
            " --gradient-checkpointing {resources.gradient_checkpointing:q} --cuda-graphs {resources.cuda_graphs:q}"
            " --shard-optimizer {resources.shard_optimizer:q}"
            " --save-every-s {resources.save_every_s:q} --grace-s {resources.grace_s:q} --hang-s {resources.hang_s:q}"
