# Each kind of evaluation has its own rule, such as evaluate_word_problem, so that a profile can choose its machines.
for kind, about in plan.experiment.kinds.evaluations.items():

    rule:
        """Run one evaluation, in all its modes, of an imported model or of one phase and seed of a run."""
        name:
            f"evaluate_{kind}"
        input:
            model_and_data=job.upstream("evaluate"),
            preflight=job.preflight("evaluate", workflow),
        output:
            manifest="results/{config}/evaluate/{run}/{phase}/{evaluation}/work/{fingerprint}/manifest.json",
        log:
            "results/{config}/evaluate/{run}/{phase}/{evaluation}/work/{fingerprint}/job.log",
        benchmark:
            "results/{config}/evaluate/{run}/{phase}/{evaluation}/work/{fingerprint}/benchmark.tsv"
        wildcard_constraints:
            evaluation=job.names("evaluate", kind),
        conda:
            job.conda_env("evaluate", workflow)
        threads: 4
        resources:
            mem_mb=64000 if about.is_large else 16000,
            runtime=720 if about.is_large else 240,
            device="auto",
            batch_size=0,
        shell:
            "implicit-llm job"
            " --run-dir results/{wildcards.config:q}/evaluate/{wildcards.run:q}/{wildcards.phase:q}/{wildcards.evaluation:q}"
            " --identity @results/{wildcards.config:q}/.jobs/evaluate/{wildcards.run:q}/{wildcards.phase:q}/{wildcards.evaluation:q}/{wildcards.fingerprint:q}.json"
            " --log {log:q}"
            " --threads {threads} --device {resources.device:q} --batch-size {resources.batch_size:q}"
