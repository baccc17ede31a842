"""Provide the functions that the Snakefile and its rules call; they present the plan in Snakemake's terms."""
