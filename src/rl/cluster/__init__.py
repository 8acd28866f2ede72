"""Runs on several machines: what Slurm, Kubernetes and Ray start. (A package, or type checkers take `ray.py` for Ray.)"""
