rule report:
    input:
        results=job.upstream("report"),
        tracking=ancient(rules.mlflow_init.output.ready),
    output:
        manifest="results/{config}/report/manifest.json",
        page="results/{config}/report/index.html",
        claims="results/{config}/report/claims.json",
        tables=expand("results/{{config}}/report/tables/{table}.{form}", table=plan.tables, form=["csv", "tex"]),
        figures=expand("results/{{config}}/report/figures/{figure}.svg", figure=plan.figures),
    log:
        "results/{config}/report/job.log",
    benchmark:
        "results/{config}/report/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        identity=job.identity("report"),
        inputs=job.inputs("report"),
    shell:
        "implicit-llm report --run-dir results/{wildcards.config}/report"
        " --identity {params.identity:q} {params.inputs:q} --log {log:q}"


# A figure or table of the paper by itself, from the jobs behind it alone.
rule excerpt:
    input:
        results=job.upstream("excerpt"),
        tracking=ancient(rules.mlflow_init.output.ready),
    output:
        manifest="results/{config}/excerpt/{excerpt}/manifest.json",
        page="results/{config}/excerpt/{excerpt}/index.html",
        claims="results/{config}/excerpt/{excerpt}/claims.json",
    log:
        "results/{config}/excerpt/{excerpt}/job.log",
    benchmark:
        "results/{config}/excerpt/{excerpt}/benchmark.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
    params:
        identity=job.identity("excerpt"),
        inputs=job.inputs("excerpt"),
    shell:
        "implicit-llm report --run-dir results/{wildcards.config}/excerpt/{wildcards.excerpt}"
        " --identity {params.identity:q} {params.inputs:q} --log {log:q}"
