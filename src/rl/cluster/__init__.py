"""Runs on several machines: what Slurm, Kubernetes and Ray start."""
