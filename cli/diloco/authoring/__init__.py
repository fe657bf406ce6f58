"""Help with writing a job file: ``diloco init``, ``diloco explain`` and ``diloco examples``."""
