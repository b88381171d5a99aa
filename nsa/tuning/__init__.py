"""Measures on a GPU what routing depends on (thresholds, schedules, tiles), and writes files of `nsa/configs/gpus`."""
