"""What the Snakefile and its rules call: the plan as Snakemake wants it."""
