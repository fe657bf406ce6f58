"""The DiLoCoJob: its models, what must hold between its fields, reading files, explaining mistakes.

Order: base, the sections, job_spec, rules, job, load. No I/O but reading the job file and what it names."""
