"""What ``bench/chaos.py`` compares with: torch's data-parallel training and torchft's DiLoCo, of the same job.

``settings`` says what a process of a baseline is told; ``programs`` are those processes, which
``bench/baseline_forkserver.py`` forks. They build the model, load the data, make the steps and keep the pace with the
built-in trainer's own code, so that all that differs is how learners meet.
"""
