"""Workloads: shapes with weights, as people call them. `file.py` reads them, `record.py` writes one of a program."""
